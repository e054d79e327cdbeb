"""What only the core itself can raise.

EngineCoreError             (engine_core.wire.errors)
└── SchedulerError          the scheduler cannot go on with what it was given
    ├── StaleResult         a result of another executor or of another step
    ├── ResultMismatch      a result that does not fit its plan: the executor is at fault
    └── Livelock            work exists, and no step brings it forward: the scheduler is at fault
"""

from __future__ import annotations

from engine_core.wire.errors import EngineCoreError


class SchedulerError(EngineCoreError):
    """The scheduler cannot go on with what it was given."""


class StaleResult(SchedulerError):
    """A result that no plan in flight waits for; to be counted and dropped.

    Args:
        field: "epoch" or "step".
        expected: the value of the oldest plan in flight; None: no plan is in flight.
        given: the result's value.
    """

    def __init__(self, field: str, expected: int | None, given: int) -> None:
        super().__init__(f"result: {field} {given}, awaited {'none' if expected is None else expected}")
        self.field = field
        self.expected = expected
        self.given = given


class ResultMismatch(SchedulerError):
    """A result with the right step and the wrong content.

    Args:
        step: of the plan.
        field: what does not fit ("token_ids" or "logprobs").
        limit: how many there must be, or the bound that each must stay under.
        given: how many there are, or the value at fault.
    """

    def __init__(self, step: int, field: str, limit: int, given: int) -> None:
        super().__init__(f"result of step {step}: {field}: {given}, expected {limit}")
        self.step = step
        self.field = field
        self.limit = limit
        self.given = given


class Livelock(SchedulerError):
    """Requests are live, and step after step none of them came forward.

    Args:
        steps: how many.
        running, waiting: requests.
        free: KV blocks that could be taken.
    """

    def __init__(self, steps: int, running: int, waiting: int, free: int) -> None:
        super().__init__(f"no progress in {steps} steps: {running} running, {waiting} waiting, {free} KV blocks free")
        self.steps = steps
        self.running = running
        self.waiting = waiting
        self.free = free
