"""Steps between launch and result. Results leave in the order of the launches.

Where a launch does the work, its result is there when it returns. Where a device works by itself, the next step must be
launched before the one before it is done: a thread then waits for the steps, and the thread that launches goes on.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, Generic, Protocol, TypeVar

from engine_core.wire.executor import StepPlan, StepResult

L = TypeVar("L")
# A device that hangs is not waited for at the end; whoever ends the process has a deadline of its own.
END_S: Final = 2.0


class StepRunner(Protocol[L]):
    """What runs steps."""

    @property
    def depth(self) -> int:
        """Steps that may be launched before the oldest of them is collected."""
        ...

    def launch(self, plan: StepPlan) -> L:
        """Start a step."""
        ...

    def collect(self, launched: L) -> StepResult:
        """Wait for the oldest step that has not been collected."""
        ...


class Collector(Generic[L]):
    """Results of steps whose launch does the work.

    Args:
        collect: gives the result of a launched step.
    """

    def __init__(self, collect: Callable[[L], StepResult]) -> None:
        self._collect = collect
        self._results: deque[StepResult] = deque()

    @property
    def out(self) -> int:
        """Steps put and not yet taken."""
        return len(self._results)

    def fileno(self) -> int | None:
        """A descriptor that is readable while there are results to take; None: they are there after `put`."""
        return None

    def put(self, launched: L) -> None:
        """Have a step collected."""
        self._results.append(self._collect(launched))

    def take(self) -> Iterator[StepResult]:
        """The results that are there.

        Raises:
            Exception: what collecting a step raised, after the results of the steps before it.
        """
        while self._results:
            yield self._results.popleft()

    def close(self) -> None:
        """End; what was not taken is lost."""


class ThreadCollector(Collector[L]):
    """Results of steps that a device works on, waited for in a thread.

    Args:
        collect: waits for a launched step; it runs in the thread.
    """

    def __init__(self, collect: Callable[[L], StepResult]) -> None:
        super().__init__(collect)
        self._pool = ThreadPoolExecutor(1, "collector")
        self._steps: deque[Future[StepResult]] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)

    @property
    def out(self) -> int:
        """See Collector."""
        return len(self._steps)

    def fileno(self) -> int:
        """See Collector."""
        return self._reader.fileno()

    def put(self, launched: L) -> None:
        """See Collector."""
        step = self._pool.submit(self._collect, launched)
        self._steps.append(step)
        step.add_done_callback(lambda _: self._writer.send(b"\0"))

    def take(self) -> Iterator[StepResult]:
        """See Collector."""
        # Bytes first: a result that comes after is announced by a byte that stays.
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        while self._steps and self._steps[0].done():
            yield self._steps.popleft().result()

    def close(self) -> None:
        """See Collector."""
        running = wait(self._steps, END_S).not_done
        self._pool.shutdown(wait=not running, cancel_futures=True)
        if not running:
            self._reader.close()
            self._writer.close()


def collector_of(runner: StepRunner[L]) -> Collector[L]:
    """The collector that suits a runner."""
    return Collector(runner.collect) if runner.depth == 1 else ThreadCollector(runner.collect)
