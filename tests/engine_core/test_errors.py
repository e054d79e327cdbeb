"""The core's own errors name field, limit and value."""

from __future__ import annotations

import inspect

import pytest

from engine_core import errors
from engine_core.errors import Livelock, ResultMismatch, SchedulerError, StaleResult
from engine_core.wire.errors import EngineCoreError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StaleResult("epoch", 2, 1), "result: epoch 1, awaited 2"),
        (StaleResult("step", None, 7), "result: step 7, awaited none"),
        (ResultMismatch(4, "token_ids", 3, 2), "result of step 4: token_ids: 2, expected 3"),
        (Livelock(101, 2, 3, 0), "no progress in 101 steps: 2 running, 3 waiting, 0 KV blocks free"),
    ],
)
def test_messages(error: SchedulerError, text: str) -> None:
    assert str(error) == text
    assert isinstance(error, EngineCoreError)


def test_the_docstring_shows_the_whole_tree() -> None:
    own = [
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__ and issubclass(kind, EngineCoreError)
    ]
    assert errors.__doc__ is not None
    assert [name for name in own if name not in errors.__doc__] == []
