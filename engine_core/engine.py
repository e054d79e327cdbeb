"""The engine core: it hears clients and the executor, lets the scheduler decide, and keeps the executor busy.

One event loop, no locks: each message is handled to its end before the next. After every message plans are sent until
as many are out as the scheduler allows; only then are outputs published, so that the device does not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from engine_core.clients import Clients
from engine_core.condition import Condition
from engine_core.ending import is_final
from engine_core.errors import ResultMismatch, StaleResult
from engine_core.executor_client import ExecutorClient
from engine_core.readiness import announcement, limits_of, unlike
from engine_core.recovery import Recovery
from engine_core.scheduler import Scheduler
from engine_core.timeline import Timeline
from engine_core.wire.budget import RestartBudget
from engine_core.wire.client import (
    PROTOCOL,
    Abort,
    Bye,
    ClientToCore,
    Drain,
    Fatal,
    Hello,
    Inspect,
    Ping,
    Progress,
    Rejected,
    Submit,
    Welcome,
)
from engine_core.wire.config import EngineConfig, config_hash
from engine_core.wire.errors import EngineCoreError
from engine_core.wire.executor import ExecutorReady, StepResult

log = logging.getLogger(__name__)

# How often deadlines are looked at; no message waits for it.
TICK_S: Final = 0.25
# A tick this late means that the process itself was stopped.
LATE_S: Final = 1.0
# Between two self-checks of an idle engine.
SELF_CHECK_S: Final = 5.0
# How long an engine that failed waits for its first client, which started it and is about to say hello.
FIRST_HELLO_S: Final = 2.0


class Engine:
    """The engine core of one server.

    Args:
        config: what to run.
        clients: who is served.
        executor: what runs the plans.
        incarnation: how many cores there have been, with this one.
        timeline: where steps are traced, if at all.
        make_scheduler: the scheduler's class.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        clients: Clients,
        executor: ExecutorClient,
        *,
        incarnation: int = 1,
        timeline: Timeline | None = None,
        make_scheduler: type[Scheduler] = Scheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._drained_by = b""
        self._leaving = False
        self._clients = clients
        self._executor = executor
        self._timeline = timeline
        self._make_scheduler = make_scheduler
        self._clock = clock
        self._condition = Condition(clients, executor, clock())
        self._checked_at = clock()
        self._unchecked = False
        self._ending: asyncio.Future[Fatal] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._budget = RestartBudget(config.recovery.max_restarts)
        self._recovery = Recovery(
            self._condition, clients, executor, self._budget, clock=clock, end=self._end, own=self._own
        )

    async def run(self) -> Fatal:
        """Run until SIGTERM or a failure; gives what clients were told at the end. No process is left behind."""
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        loop.set_exception_handler(self._callback_failed)
        loop.add_signal_handler(signal.SIGTERM, self._end, Fatal("shutdown", "engine: told to end"))
        self._own(self._serve_clients(), "clients")
        self._own(self._serve_executor(), "executor")
        self._own(self._watch_deadlines(), "deadlines")
        try:
            self._recovery.start()
            ending = await self._ending
            if ending.code != "shutdown":
                await self._clients.somebody(FIRST_HELLO_S)
        finally:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._ending.done():
                self._clients.broadcast(self._ending.result())
            self._executor.end()
        self._report(ending)
        return ending

    # Endings. Whatever ends the engine passes through _end; the first reason is the one that counts.

    def _end(self, why: Fatal) -> None:
        assert self._ending is not None, "run() makes the future"
        if not self._ending.done():
            final = is_final(
                why,
                replaceable=self._budget.limit > 0 and not self._leaving,
                replacement_failed=self._incarnation > 1 and self._condition.ready is None,
            )
            self._ending.set_result(msgspec.structs.replace(why, final=final))

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crashed(f"task {task.get_name()}", error)

    def _callback_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._crashed(str(context.get("message")), context.get("exception"))

    def _crashed(self, where: str, error: BaseException | None) -> None:
        if isinstance(error, EngineCoreError):
            log.critical("%s failed: %s", where, error)
            self._end(Fatal("internal", f"engine: {error}"))
        else:
            log.critical("%s failed", where, exc_info=error)
            self._end(Fatal("internal", f"engine: {where} failed: {type(error).__name__}"))

    def _report(self, ending: Fatal) -> None:
        status = self._condition.status(0, self._clock())
        log.log(
            logging.INFO if ending.code == "shutdown" else logging.ERROR,
            "ended (%s): %s; %d steps, requests finished: %s, refused: %s, malformed frames: %d, stale results: %d",
            ending.code,
            ending.message,
            status.steps,
            status.finished,
            status.rejected,
            status.malformed_frames,
            status.stale_results,
        )

    # The executor.

    async def _serve_executor(self) -> None:
        while True:
            match await self._executor.receive():
                case StepResult() as result:
                    self._stepped(result)
                case Progress() as progress:
                    self._condition.progress = progress
                    self._clients.broadcast(progress)
                    self._settle(self._clock())
                case ExecutorReady() as ready:
                    self._executor_ready(ready)

    def _executor_ready(self, ready: ExecutorReady) -> None:
        config, now = self._config, self._clock()
        limits, condition = limits_of(config, ready), self._condition
        if condition.scheduler is None:
            condition.scheduler = self._make_scheduler(
                config.scheduler, config.cache, limits, epoch=ready.epoch, random=random.Random(config.model.seed)
            )
            self._report_ready(ready)
        elif (fault := unlike(condition.scheduler.limits, limits)) is not None:
            self._executor.at_fault(fault)
            return
        elif limits.kv_groups != condition.scheduler.limits.kv_groups:
            ended = condition.scheduler.resize(limits.kv_groups, now)
            self._clients.publish(condition.stats.steps, ended)
        condition.ready, condition.progress_at = announcement(config, ready), now
        self._recovery.ready(ready.epoch, self._executor.pid)
        self._clients.broadcast(condition.ready)
        self._settle(now)

    def _report_ready(self, ready: ExecutorReady) -> None:
        config = self._config
        log.info(
            "ready: %s on %s, %s, quantization %s, KV cache in %s, model length %d, %d KV blocks of %d tokens, "
            "started in %.1f s",
            config.model.model,
            ready.device,
            ready.dtype,
            config.model.quantization,
            ready.kv_cache_dtype,
            ready.max_model_len,
            ready.num_kv_blocks,
            config.cache.block_size,
            sum(ready.startup_s.values()),
        )

    def _stepped(self, result: StepResult) -> None:
        sent = self._executor.landed(result)
        if sent is None or self._condition.scheduler is None:
            self._condition.stale += 1
            return
        now = self._clock()
        try:
            outputs = self._condition.scheduler.update(result, now)
        except StaleResult as error:
            self._condition.stale += 1
            log.warning("dropped a result: %s", error)
            return
        except ResultMismatch as error:
            self._executor.at_fault(str(error))
            return
        self._condition.progress_at = now
        self._unchecked = True
        if self._timeline is not None:
            self._timeline.add("core", "update", int(now * 1e9), time.monotonic_ns(), step=result.step)
            self._timeline.add_step(result, sent)
        self._settle(now)
        self._condition.stats.record((result.ended_ns - result.started_ns) / 1e9, sent.tokens)
        self._clients.publish(result.step, outputs)
        self._settle(now)

    def _settle(self, now: float) -> None:
        """What every event ends with: requests of lost clients end, and plans are sent while there is room."""
        self._end_lost(now)
        scheduler = self._condition.scheduler
        if scheduler is None:
            return
        while self._executor.ready and scheduler.in_flight < scheduler.depth:
            began = time.monotonic_ns()
            plan = scheduler.schedule(now)
            if plan is None:
                return
            if not self._executor.sent:
                self._condition.progress_at = now
            self._executor.send(plan, now)
            if self._timeline is not None:
                self._timeline.add("core", "schedule", began, time.monotonic_ns(), step=plan.step)

    def _end_lost(self, now: float) -> None:
        for identity in self._clients.take_lost():
            if self._condition.scheduler is not None:
                self._condition.scheduler.abort_client(identity, now)
                self._unchecked = True

    # Clients.

    async def _serve_clients(self) -> None:
        while True:
            # No name is bound to the frames: while the next ones are waited for, these are gone.
            self._take(await self._clients.receive())
            # A full inbox gives receive() no reason to wait; the executor must have its turn.
            await asyncio.sleep(0)

    def _take(self, batch: list[list[bytes]]) -> None:
        now = self._clock()
        for frames in batch:
            if (taken := self._clients.take(frames, now)) is not None:
                self._on_message(*taken, now)
                # At once: the same client may say hello again in this batch.
                self._end_lost(now)
        self._settle(now)

    def _on_message(self, client: bytes, message: ClientToCore, now: float) -> None:
        match message:
            case Submit():
                self._submit(client, message, now)
            case Abort():
                self._abort(client, message, now)
            case Ping():
                self._clients.send(client, self._condition.status(message.seq, now))
            case Hello():
                self._hello(client, message, now)
            case Bye():
                # The one that had it drain was its owner.
                self._leaving |= client == self._drained_by
                self._clients.remove(client, "bye")
            case Drain():
                if not self._condition.draining:
                    log.info("draining: new requests are refused")
                self._condition.draining, self._drained_by = True, client
            case Inspect():
                self._clients.send(client, self._condition.inspect(message.seq))

    def _hello(self, client: bytes, hello: Hello, now: float) -> None:
        config, state = self._config, self._condition.state
        timeout = config.deadlines.step_timeout
        welcome = Welcome(PROTOCOL, config_hash(config), state, config.model.model, os.getppid(), timeout)
        if hello.protocol != PROTOCOL:
            self._clients.answer(client, welcome)
            why = f"protocol: expected {PROTOCOL}, the peer has {hello.protocol}"
            self._clients.answer(client, Fatal("protocol", why))
            log.warning("client %s (%s) refused: %s", client.hex(), hello.name, why)
            return
        self._clients.admit(client, hello.name, now)
        self._clients.send(client, welcome)
        for told in (self._condition.progress if self._condition.ready is None else None, self._condition.ready):
            if told is not None:
                self._clients.send(client, told)

    def _submit(self, client: bytes, submit: Submit, now: float) -> None:
        scheduler = self._condition.scheduler
        if scheduler is None:
            self._reject(client, Rejected(submit.request_id, "not_ready", f"engine: {self._condition.reason}"))
            return
        if self._condition.draining and not submit.resumed:
            self._reject(client, Rejected(submit.request_id, "draining", "engine: draining, it takes nothing new"))
            return
        if not scheduler.has_work():
            self._condition.progress_at = now
        refusal = scheduler.add((client, submit.request_id), submit, now)
        if refusal is not None:
            fields = msgspec.structs.asdict(refusal)
            self._clients.send(client, Rejected(submit.request_id, **fields))

    def _reject(self, client: bytes, rejected: Rejected) -> None:
        self._condition.refused(rejected.code)
        self._clients.send(client, rejected)

    def _abort(self, client: bytes, abort: Abort, now: float) -> None:
        if self._condition.scheduler is None:
            return
        keys = [(client, request_id) for request_id in abort.request_ids]
        ended = [(key, output) for key in keys if (output := self._condition.scheduler.abort(key, now)) is not None]
        self._unchecked = True
        self._clients.publish(self._condition.stats.steps, ended)

    # Deadlines.

    async def _watch_deadlines(self) -> None:
        last = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            late, last = now - last - TICK_S, now
            if late > LATE_S:
                # What came in meanwhile has not been read; judge at the next tick.
                self._clients.forgive(late)
                self._executor.forgive(late)
                self._condition.progress_at += late
                continue
            self._clients.sweep(now)
            self._executor.check(now)
            self._check_progress(now)
            self._settle(now)
            self._check_self(now)

    def _check_progress(self, now: float) -> None:
        age, limit = self._condition.step_age(now), self._config.deadlines.step_timeout
        self._condition.stall = self._executor.stall(now, age)
        if age <= limit:
            return
        if self._executor.sent:
            self._executor.stalled(age)
        else:
            self._end(Fatal("internal", f"engine: requests wait, but nothing was planned for {age:.1f} s"))

    def _check_self(self, now: float) -> None:
        """An idle engine must hold nothing: the scheduler checks its books after work, at most every SELF_CHECK_S."""
        scheduler = self._condition.scheduler
        if scheduler is None or not self._unchecked or now - self._checked_at < SELF_CHECK_S:
            return
        if scheduler.has_work():
            return
        self._checked_at, self._unchecked = now, False
        violations = scheduler.check()
        for violation in violations:
            log.error("invariant violated: %s", violation)
        if violations:
            self._end(Fatal("internal", f"engine: {len(violations)} invariants violated, first: {violations[0]}"))
