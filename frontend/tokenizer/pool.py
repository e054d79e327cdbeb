"""Threads for tokenizing and templates, so that no text holds up the event loop.

The tokenizer libraries let other threads run while they work; a template does not, but takes its turns with them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from frontend.errors import TextOverload

T = TypeVar("T")

DEFAULT_WORKERS: Final = 2
DEFAULT_JOBS: Final = 1024
THREADS: Final = "text"


def text_threads() -> bool:
    """Whether a thread of any pool still lives: the interpreter would wait for it at its end."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


class TextPool:
    """A bounded thread pool.

    Args:
        workers: threads.
        max_jobs: jobs that may wait or run; one more is refused.

    Attributes:
        jobs: that wait or run now. A job whose caller was cancelled counts until it has ended.
    """

    def __init__(self, *, workers: int = DEFAULT_WORKERS, max_jobs: int = DEFAULT_JOBS) -> None:
        self.jobs = 0
        self._max_jobs = max_jobs
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=THREADS)

    async def run(self, work: Callable[[], T]) -> T:
        """Do `work` in a thread; what it raises is raised here.

        Raises:
            TextOverload: too many jobs.
        """
        if self.jobs >= self._max_jobs:
            raise TextOverload(self.jobs, self._max_jobs)
        loop = asyncio.get_running_loop()
        future = self._threads.submit(work)
        self.jobs += 1
        future.add_done_callback(lambda _: self._job_ended(loop))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Let go of the threads: what waits is dropped, what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _job_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the job's thread."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._forget_job)

    def _forget_job(self) -> None:
        self.jobs -= 1
