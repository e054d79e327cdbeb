"""Open requests and what the core has not been told yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from engine_core.wire.client import Abort, ClientToCore, Fatal, Output, Outputs, Rejected, Submit
from engine_core.wire.codec import pack_ids
from engine_core.wire.errors import Backpressure
from engine_core.wire.sampling import SamplingParams
from frontend.errors import EngineDead, RequestRejected
from frontend.generation import Generation, Stream
from frontend.open_requests import MAX_PARKED, OpenRequests


class Desk:
    """Open requests, and what was sent for them; `full` makes the core's queue full, `gone` takes the core away."""

    def __init__(self) -> None:
        self.sent: list[ClientToCore] = []
        self.full = False
        self.gone = False
        self.requests = OpenRequests(self._send)

    def _send(self, message: ClientToCore) -> None:
        if self.gone:
            raise EngineDead("gone")
        if self.full:
            raise Backpressure("full")
        self.sent.append(message)

    def stream(self, name: str) -> Stream:
        submit = Submit(name, pack_ids([1, 2]), SamplingParams(max_tokens=9, seed=5))
        return Stream(submit, asyncio.get_running_loop(), 1_000_000, lambda _: None)

    def add(self, name: str) -> Stream:
        stream = self.stream(name)
        self.requests.add(stream)
        return stream

    def feed(self, name: str, *tokens: int, **fields: Any) -> None:
        self.requests.feed(Outputs(1, [Output(name, list(tokens), **fields)]))


def scenario(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test whose body is a coroutine."""

    def test() -> None:
        asyncio.run(asyncio.wait_for(work(), 20))

    test.__name__ = work.__name__
    return test


@scenario
async def test_from_submission_to_end() -> None:
    desk = Desk()
    stream = desk.add("a")
    assert desk.sent == [stream.submit]
    assert "a" in desk.requests
    desk.feed("a", 3, 4)
    desk.feed("unknown", 9)
    desk.feed("a", 5, finish="length")
    assert len(desk.requests) == 0
    assert (await Generation(stream).__anext__()).token_ids == [3, 4, 5]


@scenario
async def test_another_core_is_given_all_that_is_open_with_what_came() -> None:
    desk = Desk()
    started, waiting, ended = desk.add("started"), desk.add("waiting"), desk.add("ended")
    desk.feed("started", 3, 4, cached_tokens=1)
    desk.feed("ended", 8, finish="length")
    desk.gone = True
    desk.requests.forget_unsent()
    parked = desk.stream("parked")
    desk.requests.park(parked)
    desk.gone = False
    desk.sent.clear()
    assert desk.requests.resubmit() == 3
    sent = [message for message in desk.sent if isinstance(message, Submit)]
    assert [(each.request_id, each.output, each.resumed) for each in sent] == [
        ("started", pack_ids([3, 4]), True),
        ("waiting", b"", True),
        ("parked", b"", False),
    ]
    assert all(each.params.seed == 5 for each in sent)
    # What a later core found cached is not what counts.
    desk.feed("started", 5, cached_tokens=2)
    assert (await Generation(started).__anext__()).cached_tokens == 1
    assert (waiting.ended, ended.ended) == (False, True)


@scenario
async def test_what_does_not_fit_goes_later_and_in_order() -> None:
    desk = Desk()
    for name in "abc":
        desk.add(name)
    desk.sent.clear()
    desk.full = True
    desk.requests.resubmit()
    with pytest.raises(RequestRejected, match="does not read"):
        desk.add("d")
    desk.requests.abort("b", told=True)
    desk.full = False
    desk.requests.flush()
    # The core never had b.
    assert [message.request_id for message in desk.sent if isinstance(message, Submit)] == ["a", "c"]
    assert not any(isinstance(message, Abort) for message in desk.sent)
    desk.add("d")


@scenario
async def test_aborts() -> None:
    desk = Desk()
    desk.add("a")
    desk.add("b")
    desk.requests.abort("a", told=True)
    desk.requests.abort("a", told=True)
    desk.requests.abort("unknown", told=True)
    desk.requests.abort("b", told=False)
    assert [message for message in desk.sent if isinstance(message, Abort)] == [Abort(["a"])]
    desk.feed("a", 3)
    assert len(desk.requests) == 0


@scenario
async def test_rejections_and_the_end_of_all() -> None:
    desk = Desk()
    first, second = desk.add("a"), desk.add("b")
    desk.requests.reject(Rejected("a", "never_fits", "too long", "prompt", 1, 2))
    desk.requests.reject(Rejected("unknown", "invalid", "x"))
    with pytest.raises(RequestRejected, match="too long"):
        await Generation(first).__anext__()
    desk.requests.fail_all(Fatal("executor_died", "all is over"))
    with pytest.raises(EngineDead, match="all is over") as caught:
        await Generation(second).__anext__()
    assert caught.value.code == "executor_died"
    assert len(desk.requests) == 0


@scenario
async def test_what_waits_for_a_core_is_bounded() -> None:
    desk = Desk()
    for number in range(MAX_PARKED):
        desk.requests.park(desk.stream(str(number)))
    with pytest.raises(RequestRejected, match=str(MAX_PARKED)):
        desk.requests.park(desk.stream("one more"))
