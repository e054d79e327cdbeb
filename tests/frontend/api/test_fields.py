"""What is said of fields that nobody knows."""

from __future__ import annotations

import logging

import msgspec
import pytest

from frontend.api.fields import HARMLESS, MAX_NAMES, REFUSED, FieldCheck, header_value
from frontend.api.schema import ChatRequest, CompletionRequest


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    check = FieldCheck(CompletionRequest, strict=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert check.ignored(b'{"prompt": "secret", "foo": "secret", "user": 1}') == ["foo"]
    assert [record.getMessage() for record in caplog.records] == ["request field 'foo' is not known and was ignored"]


def test_the_header_is_plain_and_bounded() -> None:
    value = header_value([f"\r\nname {number}" for number in range(1000)] + ["x" * 10_000])
    assert value.isascii()
    assert value.isprintable()
    assert value.count(",") == MAX_NAMES
    assert len(value) < 4096


def test_no_field_has_two_meanings() -> None:
    known = {field.name for kind in (CompletionRequest, ChatRequest) for field in msgspec.structs.fields(kind)}
    assert not known & REFUSED.keys()
    assert not known & HARMLESS
    assert not REFUSED.keys() & HARMLESS
