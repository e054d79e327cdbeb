"""Steps between launch and result. Results leave in the order of the launches.

Where a launch does the work, its result is there when it returns. Where a device works by itself, the next step must be
launched before the one before it is done: a thread then waits for the steps, and the thread that launches goes on.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from engine_core.wire.executor import StepPlan, StepResult

L = TypeVar("L")
# How long the thread waits at a time; nothing depends on it.
WAIT_S: Final = 10.0
# A thread that waits for a device that hangs is left behind: it is a daemon.
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
        self._results: deque[StepResult | Exception] = deque()
        self._out = 0

    @property
    def out(self) -> int:
        """Steps put and not yet taken."""
        return self._out

    def fileno(self) -> int | None:
        """A descriptor that is readable while there are results to take; None: they are there after `put`."""
        return None

    def put(self, launched: L) -> None:
        """Have a step collected."""
        self._out += 1
        self._results.append(self._collect(launched))

    def take(self) -> Iterator[StepResult]:
        """The results that are there.

        Raises:
            Exception: what collecting a step raised, after the results of the steps before it.
        """
        while self._results:
            result = self._results.popleft()
            if isinstance(result, Exception):
                raise result
            self._out -= 1
            yield result

    def close(self) -> None:
        """End; what was not taken is lost."""


class ThreadCollector(Collector[L]):
    """Results of steps that a device works on, waited for in a thread.

    Args:
        collect: waits for a launched step; it runs in the thread.
        depth: steps that may be put and not yet taken.
    """

    def __init__(self, collect: Callable[[L], StepResult], depth: int) -> None:
        super().__init__(collect)
        # One place more, for the end.
        self._todo: queue.Queue[L | None] = queue.Queue(depth + 1)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """See Collector."""
        return self._reader.fileno()

    def put(self, launched: L) -> None:
        """See Collector."""
        self._out += 1
        self._todo.put_nowait(launched)

    def take(self) -> Iterator[StepResult]:
        """See Collector."""
        # Bytes first: a result that comes after is announced by a byte that stays.
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        return super().take()

    def close(self) -> None:
        """See Collector."""
        self._todo.put_nowait(None)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._reader.close()
            self._writer.close()

    def _run(self) -> None:
        while (launched := self._next()) is not None:
            try:
                result: StepResult | Exception = self._collect(launched)
            except Exception as error:  # noqa: BLE001 - the thread that takes raises it
                result = error
            self._results.append(result)
            self._writer.send(b"\0")

    def _next(self) -> L | None:
        while True:
            try:
                return self._todo.get(timeout=WAIT_S)
            except queue.Empty:
                continue


def collector_of(runner: StepRunner[L]) -> Collector[L]:
    """The collector that suits a runner."""
    return Collector(runner.collect) if runner.depth == 1 else ThreadCollector(runner.collect, runner.depth)
