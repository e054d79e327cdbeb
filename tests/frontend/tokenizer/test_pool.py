"""Work in threads."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from frontend.errors import TextOverload
from frontend.tokenizer.pool import TextPool


async def until(pool: TextPool, jobs: int) -> None:
    """Wait until the pool holds this many jobs."""
    deadline = time.monotonic() + 5
    while pool.jobs != jobs:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def test_work_is_done_off_the_loop() -> None:
    async def scenario() -> None:
        pool = TextPool(workers=1)
        assert await pool.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        await until(pool, 0)
        pool.close()

    asyncio.run(scenario())


def test_too_many_jobs_are_refused_and_cancelled_ones_count_until_they_end() -> None:
    async def scenario() -> None:
        pool = TextPool(workers=1, max_jobs=2)
        gate = threading.Event()
        first = asyncio.create_task(pool.run(lambda: gate.wait(5)))
        second = asyncio.create_task(pool.run(lambda: gate.wait(5)))
        await until(pool, 2)
        with pytest.raises(TextOverload, match="at most 2"):
            await pool.run(lambda: None)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert pool.jobs == 2
        gate.set()
        assert await second
        await until(pool, 0)
        assert await pool.run(lambda: 7) == 7
        pool.close()

    asyncio.run(scenario())


def test_close_drops_what_waits() -> None:
    async def scenario() -> None:
        pool = TextPool(workers=1)
        gate = threading.Event()
        running = asyncio.create_task(pool.run(lambda: gate.wait(5)))
        waiting = asyncio.create_task(pool.run(lambda: None))
        await until(pool, 2)
        pool.close()
        gate.set()
        assert await running
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scenario())
