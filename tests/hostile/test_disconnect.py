"""A client that leaves frees everything within a step: in the queue, in prefill and in decode, however it asked."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.fakes.live import eventually
from tests.hostile.conftest import MAX_SEQS, STEP_TOKENS, Stack
from tests.hostile.raw import Leaving, connect, leave, request

Phase = Literal["queued", "prefill", "decode"]

ENDLESS = {"ignore_eos": True, "max_tokens": 900, "temperature": 0}
# 25 steps of prefill, and one prompt for each phase so that no cached prefix shortens it.
LONG_PROMPT = STEP_TOKENS * 25


def ask(stack: Stack, body: dict[str, Any]) -> socket.socket:
    connection = connect(stack.live.url)
    connection.sendall(request({**ENDLESS, **body}))
    return connection


def occupy(stack: Stack) -> list[socket.socket]:
    """Fill every slot."""
    before = stack.status().running
    connections = [ask(stack, {"prompt": [number + 1] * 8}) for number in range(MAX_SEQS)]
    eventually(lambda: stack.status().running == before + MAX_SEQS, "all slots are taken")
    return connections


def begin(stack: Stack, phase: Phase, fields: dict[str, Any], salt: str) -> socket.socket:
    """A request that is in the phase now."""
    steps, generated = stack.status().steps, stack.status().generation_tokens
    length = LONG_PROMPT if phase == "prefill" else 8
    connection = ask(stack, {"prompt": [7] * length, "cache_salt": salt, **fields})
    if phase == "queued":
        eventually(lambda: stack.status().waiting >= fields.get("n", 1), "it waits")
    else:
        eventually(lambda: stack.status().running >= 1 and stack.status().steps > steps + 1, "it runs")
    if phase == "decode":
        eventually(lambda: stack.status().generation_tokens > generated + 2, "tokens flow")
    if phase == "prefill":
        assert stack.status().generation_tokens == generated
    return connection


FIELDS: list[dict[str, Any]] = [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}]
PHASES: tuple[Phase, ...] = ("queued", "prefill", "decode")


def cases() -> Iterator[Any]:
    """Every phase with every kind of request and both ways to leave; the second half of them is slow."""
    for row, phase in enumerate(PHASES):
        for column, fields in enumerate(FIELDS):
            ways: tuple[Leaving, Leaving] = ("fin", "rst") if (row + column) % 2 else ("rst", "fin")
            yield phase, fields, ways[0]
            yield pytest.param(phase, fields, ways[1], marks=pytest.mark.slow)


@pytest.mark.parametrize(("phase", "fields", "how"), list(cases()), ids=str)
def test_leaving_frees_everything(slow_stack: Stack, phase: Phase, fields: dict[str, Any], how: Leaving) -> None:
    stack = slow_stack
    ended = stack.live.metric("tercet_engine_requests_finished_total", reason="abort")
    requests = stack.live.metric("tercet_request_success_total", finished_reason="abort")
    others = occupy(stack) if phase == "queued" else []
    connection = begin(stack, phase, fields, f"{phase} {fields} {how}")
    leave(connection, how)
    for other in others:
        leave(other, "rst")
    stack.settle(2.0)
    generated = stack.status().generation_tokens
    gone = fields.get("n", 1) + len(others)
    eventually(
        lambda: stack.live.metric("tercet_engine_requests_finished_total", reason="abort") == ended + gone,
        "the core counts each answer",
    )
    assert stack.live.metric("tercet_request_success_total", finished_reason="abort") == requests + 1 + len(others)
    assert stack.status().generation_tokens == generated
    assert stack.inspect().violations == []


def test_no_step_runs_after_the_one_in_flight(slow_stack: Stack) -> None:
    stack = slow_stack
    connection = begin(stack, "decode", {}, "steps")
    steps = stack.status().steps
    leave(connection, "fin")
    stack.settle(2.0)
    # Two were in flight at most, and a few ran before the core heard of it.
    assert stack.status().steps - steps < 40


def test_a_client_that_asked_ahead_is_seen_leaving(slow_stack: Stack) -> None:
    stack = slow_stack
    connection = connect(stack.live.url)
    body = {**ENDLESS, "prompt": [5] * 8}
    connection.sendall(request(body))
    eventually(lambda: stack.status().running == 1, "the first one runs")
    connection.sendall(request(body) + request(body))
    connection.sendall(request(body)[:50])
    leave(connection, "fin")
    stack.settle(2.0)


def test_requests_sent_ahead_are_answered_in_order(slow_stack: Stack) -> None:
    connection = connect(slow_stack.live.url)
    bodies = [{"prompt": [9], "max_tokens": count, "ignore_eos": True} for count in (3, 1, 2)]
    connection.sendall(b"".join(map(request, bodies)))
    connection.sendall(request(bodies[0])[:30])
    connection.sendall(request(bodies[0])[30:])
    received = b""
    while received.count(b"completion_tokens") < 4:
        received += connection.recv(65536)
    found = [part.partition(b",")[0] for part in received.split(b'"completion_tokens":')[1:]]
    assert found == [b"3", b"1", b"2", b"3"]
    connection.close()
