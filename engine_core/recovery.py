"""What follows the loss of an executor: another one, with all requests computed again, or the end of the engine.

    lost      the epoch rises, every live request goes back to the queue with the tokens it has; clients are told
    replaced  the old process is ended for sure, then the next one starts
    ready     plans are sent again; streams go on where they paused

Each replacement is taken from a budget (`--max-restarts`), also one that does not become ready. What a culprit cost is
given back (engine_core.blame). The first start is tried again only when the executor was killed from outside: what it
says or does by itself would happen again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from engine_core.blame import Blame, Verdict
from engine_core.clients import Clients
from engine_core.condition import Condition
from engine_core.executor_client import ExecutorClient
from engine_core.scheduler import RequestKey, Scheduler
from engine_core.wire.budget import RestartBudget
from engine_core.wire.client import Fatal

log = logging.getLogger(__name__)

# Pause before another try when a replacement did not become ready; it doubles each time.
RETRY_S: Final = 0.5
RETRY_MOST_S: Final = 8.0

NO_VERDICT: Final = Verdict(culprit=None, deaths=0, trial=[])


class Recovery:
    """Starts executors, and replaces lost ones.

    Args:
        condition: of the engine; clients, executor: of the engine.
        budget: of replacements.
        clock: monotonic seconds.
        end: ends the engine.
        own: runs a task whose failure ends the engine.
    """

    def __init__(
        self,
        condition: Condition,
        clients: Clients,
        executor: ExecutorClient,
        budget: RestartBudget,
        *,
        clock: Callable[[], float],
        end: Callable[[Fatal], None],
        own: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._condition = condition
        self._clients = clients
        self._executor = executor
        self._budget = budget
        self._clock = clock
        self._end = end
        self._own = own
        self._blame = Blame()
        self._why = ""
        self._lost_at: float | None = None
        self._open = 0
        self._tries = 0

    def start(self) -> None:
        """Start the first executor."""
        try:
            self._executor.start(1, self._clock(), self.lost)
        except OSError as error:
            self._end(Fatal("internal", f"engine: no executor could be started: {error}"))

    def lost(self, why: Fatal) -> None:
        """An executor is lost: decide what follows."""
        now, scheduler = self._clock(), self._condition.scheduler
        if self._budget.limit == 0 or (scheduler is None and not self._may_start_again(why)):
            log.error("executor lost: %s", why.message)
            self._end(why)
            return
        verdict = NO_VERDICT if scheduler is None else self._judge(scheduler)
        if verdict.culprit is not None:
            # The deaths before this one; this one was not taken.
            self._budget.give_back(verdict.deaths - 1)
        elif not self._budget.take(now):
            log.error("executor lost: %s; %s", why.message, self._budget.spent())
            self._end(Fatal(why.code, f"{why.message}; {self._budget.spent()}"))
            return
        self._begin(why, now)
        if scheduler is not None:
            self._restart(scheduler, verdict, now)
        self._clients.broadcast(self._condition.status(0, now))
        self._own(self._replace(self._delay()), "recovery")

    def ready(self, epoch: int, pid: int) -> None:
        """An executor is ready; when it took the place of a lost one, that is over."""
        if self._lost_at is None:
            return
        seconds = self._clock() - self._lost_at
        self._condition.recovered(self._open, seconds)
        log.warning(
            "executor lost: %s; replaced by pid %d (epoch %d) in %.2f s, %d open requests go on; "
            "%d of %d restarts used in %g minutes",
            self._why,
            pid,
            epoch,
            seconds,
            self._open,
            self._budget.used(self._clock()),
            self._budget.limit,
            self._budget.window_s / 60,
        )
        self._lost_at, self._tries = None, 0

    def _may_start_again(self, why: Fatal) -> bool:
        return why.code in ("executor_died", "stalled") and self._executor.outside

    def _judge(self, scheduler: Scheduler) -> Verdict:
        suspects = scheduler.suspects()
        if not suspects:
            return NO_VERDICT
        return self._blame.died(suspects, scheduler.live, outside=self._executor.outside)

    def _begin(self, why: Fatal, now: float) -> None:
        """Clients hear of it; a second loss during a recovery prolongs it."""
        log.info("executor lost: %s; another one starts", why.message)
        self._tries += 1
        self._condition.lost(why.message)
        if self._lost_at is None:
            self._lost_at, self._why, self._open = now, why.message, 0

    def _restart(self, scheduler: Scheduler, verdict: Verdict, now: float) -> None:
        trial = [] if verdict.culprit is not None else [*verdict.trial, *scheduler.trial]
        scheduler.restart(self._executor.epoch + 1, trial=dict.fromkeys(trial))
        if verdict.culprit is not None:
            self._fail(scheduler, verdict.culprit, verdict.deaths, now)
        self._open = max(self._open, len(scheduler.live))

    def _fail(self, scheduler: Scheduler, culprit: RequestKey, deaths: int, now: float) -> None:
        why = f"the executor died {deaths} times of this request, which ran alone at last"
        output = scheduler.fail(culprit, why, now)
        log.error("request %s of client %s given up: %s", culprit[1], culprit[0].hex(), why)
        if output is not None:
            self._clients.publish(self._condition.stats.steps, [(culprit, output)])

    def _delay(self) -> float:
        """Seconds before the next start: none for the first try."""
        return 0.0 if self._tries <= 1 else min(RETRY_S * 2.0 ** (self._tries - 2), RETRY_MOST_S)

    async def _replace(self, delay_s: float) -> None:
        await self._executor.retire()
        await asyncio.sleep(delay_s)
        try:
            self._executor.start(self._executor.epoch + 1, self._clock(), self.lost)
        except OSError as error:
            self.lost(Fatal("executor_died", f"no executor could be started: {error}"))
