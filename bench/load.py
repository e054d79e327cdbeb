"""A load: requests sent when they are due, at most so many at once, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from bench.answer import Answer
from bench.prompts import Request

Send = Callable[[Request, Answer], Awaitable[None]]


class Load(Struct, frozen=True):
    """One run.

    Attributes:
        answers: of all requests, in the order in which they were sent.
        seconds: from the first request to the end of the last answer.
        cpu_s: processor seconds of this process meanwhile: the client's own cost.
    """

    answers: list[Answer]
    seconds: float
    cpu_s: float


async def run_load(
    send: Send,
    requests: Sequence[Request],
    starts: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[], None] = lambda: None,
) -> Load:
    """Send requests and wait for all answers.

    Args:
        send: sends one request and fills in its answer.
        requests: in order.
        starts: seconds from the beginning at which each is due; one that finds max_concurrency others waits.
        max_concurrency: most requests under way; None: no limit.
        on_done: called after each answer.
    """
    room = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    answers: list[Answer] = []

    async def one(request: Request, answer: Answer) -> None:
        try:
            await send(request, answer)
        finally:
            room.release()
            on_done()

    cpu, began = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request, start in zip(requests, starts, strict=True):
            if (early := began + start - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            await room.acquire()
            answer = Answer(due=began + start, input_tokens=request.input_len)
            answers.append(answer)
            group.create_task(one(request, answer))
    return Load(answers, time.perf_counter() - began, time.process_time() - cpu)
