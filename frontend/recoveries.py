"""Counts of replaced processes, over all cores that a client has known."""

from __future__ import annotations

from engine_core.wire.client import Status


class Recoveries:
    """Adds up what each core says of its executors, and the cores themselves.

    Attributes:
        engine_restarts: cores that took the place of a lost one; engine_s: seconds of the latest such recovery.
    """

    def __init__(self) -> None:
        self.engine_restarts = 0
        self.engine_s = 0.0
        self._resubmitted = 0
        self._before = Status(0, "loading")
        self._latest = Status(0, "loading")
        self._executor_s = 0.0

    def note(self, status: Status) -> None:
        """A report of the present core."""
        self._latest = status
        self._executor_s = status.recovery_s or self._executor_s

    def core_replaced(self, seconds: float, requests: int) -> None:
        """Another core is ready: it counts from 0; so many requests were submitted to it."""
        self.engine_restarts += 1
        self.engine_s = seconds
        self._resubmitted += requests
        before, latest = self._before, self._latest
        self._before = Status(
            0,
            "loading",
            executor_restarts=before.executor_restarts + latest.executor_restarts,
            recovered=before.recovered + latest.recovered,
        )
        self._latest = Status(0, "loading")

    @property
    def executor_restarts(self) -> int:
        """Executors that took the place of a lost one, below the same core."""
        return self._before.executor_restarts + self._latest.executor_restarts

    @property
    def requests(self) -> int:
        """Open requests that went on after a loss, each counted each time."""
        return self._resubmitted + self._before.recovered + self._latest.recovered

    @property
    def executor_s(self) -> float:
        """Seconds of the latest recovery of an executor."""
        return self._executor_s
