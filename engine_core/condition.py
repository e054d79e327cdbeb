"""How the engine is: its state, its counters, and the books of the scheduler, as clients may ask for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from engine_core.clients import Clients
from engine_core.executor_client import ExecutorClient
from engine_core.scheduler import Scheduler
from engine_core.stats import StepStats
from engine_core.wire.client import EngineState, Inspection, Progress, Ready, RejectCode, Status


class Condition:
    """What the engine knows of itself.

    Attributes:
        scheduler: None until the executor is ready.
        ready: what clients are told when the engine takes requests.
        progress: the last of the start.
        draining: whether new requests are refused.
        stats: of finished steps.
        stale: results dropped.
        recovering: why an executor had to be replaced, while the next one is not ready.
        stall: why nothing goes on although all processes live.
        restarts, reopened, recovery_s, recovery_total_s: Status.executor_restarts, recovered and the two times.
        progress_at: when work began or last went on, monotonic seconds.
    """

    def __init__(self, clients: Clients, executor: ExecutorClient, now: float) -> None:
        self._clients = clients
        self._executor = executor
        self._refused: Counter[str] = Counter()
        self.scheduler: Scheduler | None = None
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.draining = False
        self.stats = StepStats()
        self.stale = 0
        self.progress_at = now
        self.recovering = ""
        self.stall = ""
        self.restarts = 0
        self.reopened = 0
        self.recovery_s = 0.0
        self.recovery_total_s = 0.0

    @property
    def state(self) -> EngineState:
        """The state that clients see."""
        return self._judged()[0]

    @property
    def reason(self) -> str:
        """Why the state is not ready, else nothing."""
        return self._judged()[1]

    def _judged(self) -> tuple[EngineState, str]:
        if self.ready is None:
            return "loading", self._loading()
        if self.draining:
            return "draining", "draining"
        if self.recovering:
            return "recovering", f"{self.recovering}; another executor starts: {self._loading()}"
        return ("stalled", self.stall) if self.stall else ("ready", "")

    def _loading(self) -> str:
        if self.progress is None:
            return "the executor is starting"
        return f"loading: {self.progress.phase} {self.progress.done} of {self.progress.total} {self.progress.unit}"

    def lost(self, why: str) -> None:
        """The executor is lost and will be replaced."""
        self.progress = None
        self.stall = ""
        if self.ready is not None:
            self.recovering = why

    def recovered(self, requests: int, seconds: float) -> None:
        """The replacement is ready; so many requests were open, and waited for so long."""
        self.recovering = ""
        self.restarts += 1
        self.reopened += requests
        self.recovery_s = seconds
        self.recovery_total_s += seconds

    def refused(self, code: RejectCode) -> None:
        """Count a submission that the scheduler did not see."""
        self._refused[code] += 1

    def step_age(self, now: float) -> float:
        """Seconds since the last progress while work exists, else 0."""
        scheduler = self.scheduler
        if scheduler is None or self.recovering or not (self._executor.sent or scheduler.has_work()):
            return 0.0
        return now - self.progress_at

    def status(self, seq: int, now: float) -> Status:
        """The answer to a Ping."""
        scheduled: dict[str, Any] = {}
        if self.scheduler is not None:
            scheduled = msgspec.structs.asdict(self.scheduler.status(now))
        scheduled["rejected"] = self._rejected(scheduled.get("rejected", {}))
        return Status(
            seq,
            self.state,
            self.reason,
            epoch=self._executor.epoch,
            executor_pid=self._executor.pid,
            steps=self.stats.steps,
            step_age_s=self.step_age(now),
            step_time_s=self.stats.seconds,
            step_tokens=self.stats.tokens,
            step_time_buckets=self.stats.time_buckets,
            step_token_buckets=self.stats.token_buckets,
            malformed_frames=self._clients.malformed + self._executor.malformed,
            stale_results=self.stale,
            executor_restarts=self.restarts,
            recovered=self.reopened,
            recovery_s=self.recovery_s,
            recovery_total_s=self.recovery_total_s,
            **scheduled,
        )

    def _rejected(self, by_scheduler: Mapping[str, int]) -> dict[str, int]:
        counts = self._refused + Counter(invalid=self._clients.invalid) + Counter(by_scheduler)
        return dict(counts)

    def inspect(self, seq: int) -> Inspection:
        """The answer to an Inspect."""
        if self.scheduler is None:
            return Inspection(seq, 0, 0, 0, 0, [])
        ledger = self.scheduler.ledger()
        return Inspection(seq, ledger.free, ledger.cached, ledger.owned, ledger.total, self.scheduler.check())
