"""The connection to an engine core: messages there and back, and whether the core lives.

Whatever ends it (a Fatal, a closed or silent connection, a frame that is no message, a fault of its own tasks) is kept
as `fatal`; the first cause stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine_core.wire.client import CLIENT_PING_S, Bye, ClientToCore, CoreToClient, Fatal, FatalCode, Ping
from engine_core.wire.codec import client_to_core, core_to_client
from engine_core.wire.errors import Backpressure, MalformedFrame
from engine_core.wire.transport import connect_dealer, send_now
from frontend.errors import EngineDead

log = logging.getLogger(__name__)

# Frames handled before other tasks get a turn.
FRAMES_PER_TURN: Final = 64
# Milliseconds that Bye gets to leave.
BYE_LINGER_MS: Final = 100
LAST_WORDS_S: Final = 0.2
CLOSED: Final = "the engine core closed the connection"


class Connection:
    """A socket to the core and the tasks that receive, ping and watch.

    Args:
        path: the core's socket.
        on_message: called with each message, except Fatal.
        on_dead: called once, when `fatal` is set.
        before_ping: called before each ping.

    Attributes:
        fatal: why nothing more will come from this core, None while it lives; final when no other core may follow.
        silent_s: seconds since the core said something.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_message: Callable[[CoreToClient], None],
        on_dead: Callable[[Fatal], None],
        before_ping: Callable[[], None],
    ) -> None:
        self.fatal: Fatal | None = None
        self.silent_s = 0.0
        self._silence_s = float("inf")
        self._on_message = on_message
        self._on_dead = on_dead
        self._before_ping = before_ping
        self._encode = client_to_core().encode
        self._decode = core_to_client().decode
        self._heard = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()
        self._socket = connect_dealer(self._context, path)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._own(self._receive())
        self._own(self._watch())

    def send(self, message: ClientToCore) -> None:
        """Hand a message to the socket, without waiting.

        Raises:
            EngineDead: the core is gone.
            Backpressure: it does not read.
        """
        if self.fatal is not None:
            raise EngineDead(self.fatal.message, self.fatal.code)
        send_now(self._socket, self._encode(message))

    def start_pings(self, silence_s: float) -> None:
        """Ping from now on, and take silence of `silence_s` seconds for death."""
        self._silence_s = silence_s
        self._own(self._ping())

    def die(self, code: FatalCode, message: str, *, final: bool = False) -> None:
        """Nothing more comes from this core; nor from any other, if that is final."""
        if self.fatal is None:
            self.fatal = Fatal(code, message, final)
            self._on_dead(self.fatal)

    async def close(self) -> None:
        """Say good-bye and let go of the socket; a second call does nothing."""
        if self._socket.closed:
            return
        with contextlib.suppress(Backpressure, EngineDead):
            self.send(Bye())
        self.die("internal", "the client was closed", final=True)
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=BYE_LINGER_MS)
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            # Whoever closes may be cancelled meanwhile; nobody would come back for the context.
            await asyncio.shield(asyncio.to_thread(self._context.term))

    def _own(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, MalformedFrame):
            self.die("protocol", f"client: {error}")
            return
        log.error("client of the engine core", exc_info=error)
        # A fault of this side would come again with the next core.
        self.die("internal", f"client: {error}", final=True)

    async def _receive(self) -> None:
        while self.fatal is None:
            message = self._decode(await self._socket.recv())
            self._heard += 1
            if isinstance(message, Fatal):
                self.die(message.code, message.message, final=message.final)
            else:
                self._on_message(message)
            if self._heard % FRAMES_PER_TURN == 0:
                # A frame that waits already makes recv return without a turn for other tasks.
                await asyncio.sleep(0)

    async def _watch(self) -> None:
        await recv_monitor_message(self._monitor)
        # What the core said before it went is still in the queue: a Fatal tells more than this.
        await asyncio.sleep(LAST_WORDS_S)
        self.die("internal", CLOSED)

    async def _ping(self) -> None:
        # Silence is counted in turns of this loop, so that a program that held up its own loop blames no one.
        seq = 0
        while self.fatal is None:
            heard = self._heard
            seq += 1
            self._before_ping()
            with contextlib.suppress(Backpressure):
                self.send(Ping(seq))
            await asyncio.sleep(CLIENT_PING_S)
            self.silent_s = self.silent_s + CLIENT_PING_S if heard == self._heard else 0.0
            if self.silent_s >= self._silence_s:
                self.die("stalled", f"the engine core said nothing for {self.silent_s:g} s")
