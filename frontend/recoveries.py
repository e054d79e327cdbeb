"""Counts of replaced processes, over all cores that a client has known."""

from __future__ import annotations

from engine_core.wire.client import Status


class Recoveries:
    """Adds up what each core says of its executors, and the cores themselves.

    Attributes:
        engine_restarts: cores that took the place of a lost one; engine_s: seconds of the latest such recovery.
        executor_s: seconds of the latest recovery of an executor below a core.
    """

    def __init__(self) -> None:
        self.engine_restarts = 0
        self.engine_s = 0.0
        self.executor_s = 0.0
        self._latest = Status(0, "loading")
        self._new = False
        self._restarts_before = 0
        self._requests_before = 0

    def note(self, status: Status) -> None:
        """A report of the present core."""
        # A core dies with its executor: the same executor is the same core, which goes on counting.
        if self._new and status.executor_pid and status.executor_pid != self._latest.executor_pid:
            self._restarts_before += self._latest.executor_restarts
            self._requests_before += self._latest.recovered
        if status.executor_pid:
            self._latest, self._new = status, False
            self.executor_s = status.recovery_s or self.executor_s

    def core_lost(self) -> None:
        """What is reported from now on may come from another core."""
        self._new = True

    def reconnected(self, requests: int) -> None:
        """A core is ready after a loss; so many requests were submitted to it anew."""
        self._requests_before += requests

    def engine_replaced(self, seconds: float) -> None:
        """A core took the place of a lost one."""
        self.engine_restarts += 1
        self.engine_s = seconds

    @property
    def executor_restarts(self) -> int:
        """Executors that took the place of a lost one, below the same core."""
        return self._restarts_before + self._latest.executor_restarts

    @property
    def requests(self) -> int:
        """Open requests that went on after a loss, each counted each time."""
        return self._requests_before + self._latest.recovered
