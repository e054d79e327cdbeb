"""Answers that are being made: counted, waited for, cut."""

from __future__ import annotations

import asyncio

from frontend.api.running import Running
from frontend.errors import ClientGone, ServerStopping


def test_waiting_for_the_last_one() -> None:
    async def main() -> None:
        running = Running()
        assert await running.wait_idle(0.0)
        task = asyncio.create_task(asyncio.sleep(60))
        answer = running.enter(task)
        assert len(running) == 1
        assert not await running.wait_idle(0.0)
        waiting = asyncio.create_task(running.wait_idle(5))
        answer.cut(ClientGone("left"))
        answer.cut(ServerStopping())
        assert isinstance(answer.reason, ClientGone)
        await asyncio.wait({task})
        assert task.cancelled()
        running.leave(answer)
        assert await waiting

    asyncio.run(main())


def test_an_answer_that_ended_is_not_cut() -> None:
    async def main() -> None:
        running = Running()
        task = asyncio.create_task(asyncio.sleep(0))
        answer = running.enter(task)
        await task
        assert running.cut(ServerStopping()) == 1
        assert answer.reason is None

    asyncio.run(main())
