"""Ids and log lines of requests. tests/hostile/test_logs.py has the same on a whole server."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from frontend.api.ticket import KEY, Ticketed


async def ok(scope: Scope, _: Receive, send: Send) -> None:
    scope[KEY].facts["tokens"] = 7
    await send({"type": "http.response.start", "status": 201, "headers": [(b"x", b"y")]})
    await send({"type": "http.response.body", "body": b""})


async def broken(_: Scope, __: Receive, ___: Send) -> None:
    raise RuntimeError("on purpose")


async def nothing() -> Message:
    return {"type": "http.disconnect"}


def asked(app: Ticketed, path: str = "/v1/models", headers: Any = ()) -> list[Message]:
    """What the application sends."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
    asyncio.run(app(scope, nothing, send))
    return sent


def test_the_id_is_added_to_the_answer() -> None:
    start, _ = asked(Ticketed(ok, log=False), headers=[(b"x-request-id", b"mine")])
    assert start["headers"] == [(b"x", b"y"), (b"x-request-id", b"mine")]
    start, _ = asked(Ticketed(ok, log=False))
    assert dict(start["headers"])[b"x-request-id"].startswith(b"req-")


def test_the_line(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([1.0, 3.5])
    with caplog.at_level(logging.INFO):
        asked(Ticketed(ok, log=True, clock=lambda: next(times)), path="/a\nb", headers=[(b"x-request-id", b"mine")])
    (record,) = caplog.records
    assert record.getMessage() == "request ended"
    assert vars(record)["facts"] == {
        "request_id": "mine",
        "method": "GET",
        "path": "'/a\\nb'",
        "status": 201,
        "seconds": 2.5,
        "tokens": 7,
    }


def test_a_failure_has_its_line_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="on purpose"):
        asked(Ticketed(broken, log=True))
    (record,) = caplog.records
    assert vars(record)["facts"]["status"] == 0


@pytest.mark.parametrize(("path", "log"), [("/health", True), ("/metrics", True), ("/v1/models", False)])
def test_no_line_for_monitors_or_unless_wanted(caplog: pytest.LogCaptureFixture, path: str, log: bool) -> None:
    with caplog.at_level(logging.INFO):
        asked(Ticketed(ok, log=log), path=path)
    assert caplog.records == []
