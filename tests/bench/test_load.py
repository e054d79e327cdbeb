"""When requests of a load are sent."""

from __future__ import annotations

import asyncio
import time

from bench.answer import Answer
from bench.load import Load, run_load
from bench.prompts import Request

REQUEST = Request([1], 1, 1)


def load(count: int, starts: list[float] | None, most: int | None, seconds: float) -> tuple[Load, int, int]:
    """A load of requests that take `seconds` each; also the most at once, and how often on_done was called."""
    now = peak = done = 0

    def ended() -> None:
        nonlocal done
        done += 1

    async def send(request: Request, answer: Answer) -> None:
        nonlocal now, peak
        assert request is REQUEST
        now += 1
        peak = max(peak, now)
        answer.sent = time.perf_counter()
        await asyncio.sleep(seconds)
        answer.arrivals = [time.perf_counter()]
        now -= 1

    found = asyncio.run(run_load(send, [REQUEST] * count, starts or [0.0] * count, most, ended))
    return found, peak, done


def test_no_more_than_the_limit_are_under_way() -> None:
    found, peak, done = load(12, None, 3, 0.005)
    assert (peak, done, len(found.answers)) == (3, 12, 12)
    assert found.seconds >= 4 * 0.005


def test_without_a_limit_all_are() -> None:
    assert load(12, None, None, 0.005)[1] == 12


def test_requests_are_sent_when_they_are_due() -> None:
    found, _, _ = load(3, [0.0, 0.02, 0.05], None, 0.0)
    first = found.answers[0].due
    assert [round(answer.due - first, 3) for answer in found.answers] == [0.0, 0.02, 0.05]
    assert all(answer.sent >= answer.due for answer in found.answers)


def test_one_that_finds_no_room_is_late() -> None:
    found, peak, _ = load(2, [0.0, 0.0], 1, 0.03)
    assert peak == 1
    assert found.answers[1].sent - found.answers[1].due >= 0.03
