"""Counts of replaced processes go on over cores, each of which counts from 0."""

from __future__ import annotations

from engine_core.wire.client import Status
from frontend.recoveries import Recoveries


def status(executor: int, restarts: int, recovered: int, seconds: float = 0.0) -> Status:
    return Status(
        0, "ready", executor_pid=executor, executor_restarts=restarts, recovered=recovered, recovery_s=seconds
    )


def test_over_two_cores() -> None:
    counts = Recoveries()
    assert (counts.executor_restarts, counts.engine_restarts, counts.requests, counts.executor_s) == (0, 0, 0, 0.0)
    counts.note(status(10, 0, 0))
    counts.note(status(11, 1, 4, 0.5))
    assert (counts.executor_restarts, counts.requests, counts.executor_s) == (1, 4, 0.5)
    counts.core_lost()
    # The next core says something before it has an executor, and before it is ready.
    counts.note(status(0, 0, 0))
    counts.note(status(12, 0, 0))
    assert (counts.executor_restarts, counts.requests) == (1, 4)
    counts.reconnected(3)
    counts.engine_replaced(2.0)
    assert (counts.executor_restarts, counts.engine_restarts, counts.requests) == (1, 1, 7)
    counts.note(status(13, 2, 5, 0.25))
    assert (counts.executor_restarts, counts.requests, counts.executor_s, counts.engine_s) == (3, 12, 0.25, 2.0)


def test_a_core_that_was_only_lost_from_sight_counts_on() -> None:
    counts = Recoveries()
    counts.note(status(10, 1, 4))
    counts.core_lost()
    counts.reconnected(2)
    counts.note(status(10, 1, 4))
    assert (counts.executor_restarts, counts.engine_restarts, counts.requests) == (1, 0, 6)
