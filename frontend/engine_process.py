"""The engine core below this server: started, connected to, watched, replaced when it is lost, ended.

The core is lost when its process ends, when its connection closes, when it is silent for longer than --step-timeout, or
when it says that it cannot go on. Another one takes its place within the budget of --max-restarts; the client submits
all open requests to it. The first start is tried again only when the core was killed from outside: what it says or does
by itself would happen again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from engine_core.wire.budget import RestartBudget
from engine_core.wire.child import Child, ending
from engine_core.wire.client import Fatal, Progress, Ready
from engine_core.wire.config import EngineConfig, config_hash, write_config
from engine_core.wire.errors import Backpressure
from engine_core.wire.pulse import Pulse, sample
from frontend.async_client import SEED_BITS, AsyncClient
from frontend.connection import CLOSED
from frontend.errors import (
    EXIT_REFUSED,
    EXIT_USAGE,
    EngineDead,
    EngineFailed,
    EngineTimeout,
    FrontendError,
    StartError,
    StartRefused,
)
from frontend.health import Signs
from frontend.tokenizer.base import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

CORE_MODULE: Final = ("-m", "engine_core")
CONFIG_FILE: Final = "engine.json"
WELCOME_S: Final = 30.0
# The core has its own deadline for the start; this one is for a core that hangs.
START_MARGIN_S: Final = 10.0
WATCH_S: Final = 0.25
LAST_WORDS_S: Final = 2.0
LOOK_S: Final = 0.01
END_S: Final = 5.0
# Time for the lost core's executor to be gone, and what it held with it.
EXECUTOR_END_S: Final = 5.0
# Pause before another try when a replacement did not become ready; it doubles each time.
RETRY_S: Final = 0.5
RETRY_MOST_S: Final = 8.0


class EngineProcess:
    """The engine core, whichever incarnation, and the connection to it.

    Args:
        config: of the engine.
        runtime_dir: private directory for the core's configuration and sockets.
        socket: where the core listens to clients.
        tokenizer: of the model.
        max_backlog_bytes: most that may wait to be read of one answer.
        on_progress: called with each Progress of the first start.
        on_ready: called when the engine takes requests for the first time.
        trace_file: where the core leaves a timeline of its steps, if at all; each core writes it anew.
        module: how Python starts the core.

    Attributes:
        client: the connection, which outlives cores; None until there is one.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime_dir: Path,
        socket: Path,
        tokenizer: Tokenizer,
        *,
        max_backlog_bytes: int,
        on_progress: Callable[[Progress], None],
        on_ready: Callable[[Ready], None],
        trace_file: Path | None = None,
        module: Sequence[str] = CORE_MODULE,
    ) -> None:
        self.client: AsyncClient | None = None
        self._config = config
        self._runtime_dir = runtime_dir
        self._socket = socket
        self._tokenizer = tokenizer
        self._max_backlog_bytes = max_backlog_bytes
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._trace_file = trace_file
        self._module = module
        self._random = random.Random(config.model.seed)
        self._budget = RestartBudget(config.recovery.max_restarts)
        self._child: Child | None = None
        self._pulse = Pulse(0, 0.0)
        self._ended = asyncio.Event()
        self._failure: StartError | None = None
        self._was_ready = False
        self._lost: str | None = None
        self._lost_at = 0.0
        self._tries = 0

    @property
    def signs(self) -> Signs:
        """What is known of the engine's health."""
        known = Signs() if self.client is None else self.client.signs
        if self._failure is not None:
            return replace(known, dead=str(self._failure))
        return replace(known, lost=known.lost or self._lost, stopped_s=self._pulse.stopped_s(time.monotonic()))

    async def run(self) -> StartError:
        """Keep an engine running; gives why there is none any more."""
        incarnation = 1
        while True:
            loss = await self._live(incarnation)
            if not loss.again or not self._budget.take(time.monotonic()):
                return self._fail(loss)
            incarnation += 1
            await self._replace(loss)

    async def _live(self, incarnation: int) -> Loss:
        """One core, from its start to its loss."""
        error: FrontendError | None = None
        try:
            self._spawn(incarnation)
            if self.client is None:
                self.client = await self._unless_ended(self._connect())
            limit = self._config.deadlines.start_timeout + START_MARGIN_S
            ready = await self._unless_ended(self.client.wait_ready(limit))
            self._note_ready(ready)
            await self._watch(self.client)
        except (EngineDead, EngineTimeout, _CoreEnded, _CoreStopped) as found:
            error = found
        return await self._verdict(error)

    def _spawn(self, incarnation: int) -> None:
        path = self._runtime_dir / CONFIG_FILE
        write_config(self._config, path)
        arguments = [*self._module, "--config", str(path), "--socket", str(self._socket)]
        arguments += ["--runtime-dir", str(self._runtime_dir), "--incarnation", str(incarnation)]
        if self._trace_file is not None:
            arguments += ["--trace-file", str(self._trace_file)]
        self._ended.clear()
        self._child = Child.spawn("engine core", arguments)
        self._pulse = Pulse(self._child.pid, time.monotonic())
        asyncio.get_running_loop().add_reader(self._child.fileno(), self._on_end, self._child)

    def _on_end(self, child: Child) -> None:
        asyncio.get_running_loop().remove_reader(child.fileno())
        self._ended.set()

    async def _connect(self) -> AsyncClient:
        client = await AsyncClient.connect(
            self._socket,
            name="http",
            deadline_s=WELCOME_S,
            tokenizer=self._tokenizer,
            on_progress=self._show_progress,
            max_backlog_bytes=self._max_backlog_bytes,
            silence_s=self._config.deadlines.step_timeout,
            # It is told when no other core comes.
            return_s=float("inf"),
            draw_seed=lambda: self._random.getrandbits(SEED_BITS),
        )
        if client.config_hash != config_hash(self._config):
            await client.close()
            raise EngineDead("another engine core answers on the socket", "protocol")
        return client

    def _show_progress(self, progress: Progress) -> None:
        if not self._was_ready:
            self._on_progress(progress)

    def _note_ready(self, ready: Ready) -> None:
        if not self._was_ready:
            self._was_ready = True
            self._on_ready(ready)
        if self._lost is not None and self._child is not None and self.client is not None:
            self.client.recoveries.engine_replaced(time.monotonic() - self._lost_at)
            logger.warning(
                "engine core lost: %s; replaced by pid %d in %.2f s, %d open requests go on; "
                "%d of %d restarts used in %g minutes",
                self._lost,
                self._child.pid,
                time.monotonic() - self._lost_at,
                self.client.open_generations,
                self._budget.used(time.monotonic()),
                self._budget.limit,
                self._budget.window_s / 60,
            )
        self._lost, self._tries = None, 0

    async def _watch(self, client: AsyncClient) -> None:
        """Return when the core is lost."""
        before = time.monotonic()
        while client.fatal is None and not self._ended.is_set():
            if client.lost is not None and not await self._heals(client):
                return
            await self._pause(WATCH_S)
            now = time.monotonic()
            if now - before > 1.0 + WATCH_S:
                # This process was held up itself.
                self._pulse.forgive(now - before)
            before = now
            self._pulse.look(now)

    async def _heals(self, client: AsyncClient) -> bool:
        """Whether the client finds the core again: it lives, and had only forgotten this client."""
        deadline = time.monotonic() + LAST_WORDS_S
        while client.lost is not None and not self._ended.is_set():
            if client.lost.code == "stalled" or time.monotonic() > deadline:
                return False
            await self._pause(LOOK_S)
        return client.lost is None

    async def _unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work, unless the core ends, or is stopped for too long, before."""
        task = asyncio.create_task(work)
        others = (asyncio.create_task(self._ended.wait()), asyncio.create_task(self._stopped()))
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._ended.is_set():
                # What the core said last may be on its way.
                if self.client is None:
                    await asyncio.wait({task}, timeout=LAST_WORDS_S)
                await self._hear_out()
            if task.done():
                return task.result()
            raise _CoreEnded("it ended") if self._ended.is_set() else _CoreStopped("it was stopped by a signal")
        finally:
            for each in (task, *others):
                each.cancel()
            await asyncio.gather(task, *others, return_exceptions=True)

    async def _stopped(self) -> None:
        """Return when the core has been stopped by a signal for longer than a step may take."""
        limit = self._config.deadlines.step_timeout
        while self._pulse.stopped_s(time.monotonic()) <= limit:
            await asyncio.sleep(WATCH_S)
            self._pulse.look(time.monotonic())

    async def _pause(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _verdict(self, error: FrontendError | None) -> Loss:
        """The cause in one line, as precisely as core and system tell it, and whether another core may help."""
        client, child = self.client, self._child
        hangs = isinstance(error, _CoreStopped) or (
            client is not None and client.lost is not None and client.lost.code == "stalled"
        )
        if not hangs:
            # A core that closed its socket ends soon; one that ended may have said why.
            await self._pause(LAST_WORDS_S)
            await self._hear_out()
        status = None if child is None else child.status()
        said = _said(client, error)
        how = "" if status is None else ending(status)
        if said is not None and said.code == "start_refused" and said.final:
            return Loss(said.message, StartRefused(said.message), again=False)
        cause = said.message if said is not None else str(error or "it ended")
        if child is not None and how:
            # That the connection closed is the consequence.
            cause = f"pid {child.pid} ended: {how}" if cause == CLOSED else f"{cause} ({how})"
        if not self._was_ready and status in (EXIT_USAGE, EXIT_REFUSED):
            known = f"the engine core refused to start ({how}); its own lines say why"
            return Loss(cause, StartRefused(said.message if said is not None else known), again=False)
        failure = EngineFailed(f"the engine core failed: {cause}")
        outside = isinstance(error, _CoreStopped) if status is None else status <= 0
        final = client is not None and client.fatal is not None
        return Loss(cause, failure, again=not final and (self._was_ready or outside))

    async def _hear_out(self) -> None:
        """The connection closes with the process, once what came before has been read."""
        client, deadline = self.client, time.monotonic() + LAST_WORDS_S
        if client is None:
            return
        while client.fatal is None and client.lost is None and time.monotonic() < deadline:  # noqa: ASYNC110 - rare
            await asyncio.sleep(LOOK_S)

    def _fail(self, loss: Loss) -> StartError:
        failure = loss.failure
        if loss.again and self._budget.limit > 0:
            failure = EngineFailed(f"{failure}; {self._budget.spent()}")
        self._failure = failure
        if self.client is not None:
            self.client.cut(Fatal("internal", str(failure)))
        return failure

    async def _replace(self, loss: Loss) -> None:
        """See that nothing is left of the lost core before the next one starts."""
        if self._lost is None:
            self._lost, self._lost_at = loss.cause, time.monotonic()
        logger.info("engine core lost: %s; another one starts", loss.cause)
        self._tries += 1
        client = self.client
        if client is not None and client.lost is None:
            client.cut(Fatal("internal", loss.cause, final=False))
        executor = 0 if client is None or client.status is None else client.status.executor_pid
        await self._end_child(0.0)
        deadline = time.monotonic() + EXECUTOR_END_S
        while _runs(executor) and time.monotonic() < deadline:  # noqa: ASYNC110 - no event tells of another's child
            await asyncio.sleep(LOOK_S)
        if self._tries > 1:
            await asyncio.sleep(min(RETRY_S * 2.0 ** (self._tries - 2), RETRY_MOST_S))

    def drain(self) -> None:
        """Ask the core to take nothing new."""
        if self.client is not None and self.client.fatal is None:
            try:
                self.client.drain()
            except Backpressure:
                logger.warning("the engine core does not read; it was not told to drain")

    async def wait_idle(self, seconds: float) -> None:
        """Return when the core says that it has no request, or is gone; after `seconds` at the latest."""
        deadline = time.monotonic() + seconds
        while not self._is_idle() and time.monotonic() < deadline:  # noqa: ASYNC110 - the core is asked twice a second
            await asyncio.sleep(LOOK_S)

    def _is_idle(self) -> bool:
        client = self.client
        if client is None or client.fatal is not None or client.status is None:
            return True
        if client.lost is not None or client.status.state == "loading":
            return False  # What is open will be submitted to the core that comes.
        return client.status.running + client.status.waiting == 0

    async def stop(self) -> None:
        """End the connection and the process."""
        self.drain()
        if self.client is not None:
            await self.client.close()
        await self._end_child(END_S)

    async def _end_child(self, grace_s: float) -> None:
        child, self._child = self._child, None
        if child is not None:
            asyncio.get_running_loop().remove_reader(child.fileno())
            await asyncio.to_thread(child.end, grace_s)


class Loss:
    """The end of one core.

    Attributes:
        cause: in a few words.
        failure: what to say if none follows.
        again: whether another one may help.
    """

    def __init__(self, cause: str, failure: StartError, *, again: bool) -> None:
        self.cause = cause
        self.failure = failure
        self.again = again


class _CoreEnded(FrontendError):
    """The process ended while it was waited for."""


class _CoreStopped(FrontendError):
    """The process was stopped while it was waited for."""


def _said(client: AsyncClient | None, error: FrontendError | None) -> Fatal | None:
    """What the core, or the connection to it, gave as the cause."""
    known = None if client is None else client.fatal or client.lost
    if known is None and isinstance(error, EngineDead):
        return Fatal(error.code, error.message)  # type: ignore[arg-type]
    return known


def _runs(pid: int) -> bool:
    """Whether a process that is no child of this one still holds anything."""
    seen = sample(pid) if pid not in (0, os.getpid()) else None
    return seen is not None and seen.state not in ("Z", "X")
