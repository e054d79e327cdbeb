"""The engine core below this server: started, connected to, watched, ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from engine_core.wire.child import Child
from engine_core.wire.client import Progress, Ready
from engine_core.wire.config import EngineConfig, config_hash, write_config
from engine_core.wire.errors import Backpressure
from frontend.client import AsyncClient
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
END_S: Final = 5.0


class EngineProcess:
    """One engine core and the connection to it.

    Args:
        config: of the engine.
        runtime_dir: private directory for the core's configuration and sockets.
        socket: where the core listens to clients.
        tokenizer: of the model.
        max_backlog_bytes: most that may wait to be read of one answer.
        on_progress: called with each Progress of the start.
        on_ready: called when the engine takes requests.
        module: how Python starts the core.

    Attributes:
        client: the connection; None until there is one.
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
        self._module = module
        self._child: Child | None = None
        self._ended = asyncio.Event()
        self._failure: StartError | None = None

    @property
    def signs(self) -> Signs:
        """What is known of the engine's health."""
        known = Signs() if self.client is None else self.client.signs
        return known if self._failure is None else replace(known, dead=str(self._failure))

    async def run(self) -> StartError:
        """Keep an engine running; gives why there is none any more.

        An incarnation of the core lives and dies in `_live`, so that a restart is another turn here.
        """
        self._failure = await self._live()
        return self._failure

    async def _live(self) -> StartError:
        try:
            self._spawn()
            self.client = client = await self._unless_ended(self._connect())
            ready = await self._unless_ended(client.wait_ready(self._config.deadlines.start_timeout + START_MARGIN_S))
            self._on_ready(ready)
            while client.fatal is None and not self._ended.is_set():
                await self._pause(WATCH_S)
        except (EngineDead, EngineTimeout, _CoreEnded) as error:
            return await self._verdict(error)
        return await self._verdict(None)

    def _spawn(self) -> None:
        path = self._runtime_dir / CONFIG_FILE
        write_config(self._config, path)
        arguments = [*self._module, "--config", str(path), "--socket", str(self._socket)]
        self._child = Child.spawn("engine core", [*arguments, "--runtime-dir", str(self._runtime_dir)])
        asyncio.get_running_loop().add_reader(self._child.fileno(), self._ended.set)

    async def _connect(self) -> AsyncClient:
        client = await AsyncClient.connect(
            self._socket,
            name="http",
            deadline_s=WELCOME_S,
            tokenizer=self._tokenizer,
            on_progress=self._on_progress,
            max_backlog_bytes=self._max_backlog_bytes,
        )
        if client.config_hash != config_hash(self._config):
            await client.close()
            raise EngineDead("another engine core answers on the socket", "protocol")
        return client

    async def _unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                # What the core said last may be on its way.
                await asyncio.wait({task}, timeout=LAST_WORDS_S)
            if not task.done():
                raise _CoreEnded("the engine core ended")
            return task.result()
        finally:
            task.cancel()
            ended.cancel()
            await asyncio.gather(task, ended, return_exceptions=True)

    async def _pause(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _verdict(self, error: FrontendError | None) -> StartError:
        """The cause in one line, as precisely as core and system tell it."""
        await self._pause(LAST_WORDS_S)
        fatal = self.client.fatal if self.client is not None else None
        status = self._child.status() if self._child is not None else None
        code, message = ("", "") if fatal is None else (fatal.code, fatal.message)
        if fatal is None and isinstance(error, EngineDead):
            code, message = error.code, error.message
        how = "" if status is None else f"signal {-status}" if status < 0 else f"exit status {status}"
        if code == "start_refused":
            return StartRefused(message)
        if status in (EXIT_USAGE, EXIT_REFUSED):
            return StartRefused(message or f"the engine core refused to start ({how}); its own lines say why")
        cause = message or str(error or "it ended")
        return EngineFailed(f"the engine core failed: {cause}" + (f" ({how})" if how else ""))

    def drain(self) -> None:
        """Ask the core to take nothing new."""
        if self.client is not None and self.client.fatal is None:
            try:
                self.client.drain()
            except Backpressure:
                logger.warning("the engine core does not read; it was not told to drain")

    async def stop(self) -> None:
        """End the connection and the process."""
        if self.client is not None:
            await self.client.close()
        child, self._child = self._child, None
        if child is not None:
            asyncio.get_running_loop().remove_reader(child.fileno())
            await asyncio.to_thread(child.end, END_S)


class _CoreEnded(FrontendError):
    """The process ended while it was waited for."""
