"""Errors stand in one tree, and name what is wrong with the numbers."""

from __future__ import annotations

import inspect

import pytest

from engine_core.wire import errors
from engine_core.wire.errors import (
    Backpressure,
    EngineCoreError,
    MalformedFrame,
    SocketPathTooLong,
    WireError,
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SocketPathTooLong("/a/b", 3), "socket path: 4 bytes, at most 3: /a/b"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_messages(error: EngineCoreError, message: str) -> None:
    assert str(error) == message


@pytest.mark.parametrize(
    ("parent", "children"),
    [
        (EngineCoreError, {WireError}),
        (WireError, {MalformedFrame, Backpressure, SocketPathTooLong}),
    ],
)
def test_the_tree(parent: type[EngineCoreError], children: set[type[EngineCoreError]]) -> None:
    assert {kind for kind in parent.__subclasses__() if kind.__module__ == errors.__name__} == children


def test_the_tree_at_the_top_names_every_error() -> None:
    assert errors.__doc__ is not None
    for name, _ in inspect.getmembers(errors, inspect.isclass):
        assert name in errors.__doc__
