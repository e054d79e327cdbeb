"""The way to the engine core at a socket, which outlives cores: hello, readiness, and the way back after a loss.

A core is lost when its connection closes, when it is silent for too long, when it sends what is no message, or when it
says so itself. Unless it said that all is over, another core is looked for at the same socket: by then the server has
started one, or the client alone had been forgotten. `lost` is set from the loss to the next Ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_core.wire import client as wire
from frontend.connection import Connection
from frontend.errors import EngineDead, EngineTimeout

# Silence of a core that does not say how long a step may take.
DEFAULT_SILENCE_S: Final = 300.0
# A new core listens before it loads anything, so it answers soon.
DEFAULT_RETURN_S: Final = 10.0
LOOK_S: Final = 0.1


@dataclass(frozen=True)
class Ears:
    """Who is told what.

    Attributes:
        message: each message, other than those of the handshake.
        ready: the engine takes requests; also after each recovery.
        lost: the core is lost, and another one is looked for.
        ended: nothing more will come.
        before_ping: something may be sent now.
    """

    message: Callable[[wire.CoreToClient], None]
    ready: Callable[[wire.Ready], None]
    lost: Callable[[wire.Fatal], None]
    ended: Callable[[wire.Fatal], None]
    before_ping: Callable[[], None]


class Link:
    """One client's way to whatever core listens at a socket.

    Args:
        socket: of the core.
        name: of the client, for the core's log.
        silence_s: a core that says nothing for so long is lost; None: as long as the core says a step may take.
        return_s: how long to look for another core after a loss; 0: not at all.
        ears: who is told.

    Attributes:
        fatal: why nothing more will come; None while a core lives or is looked for.
        lost: why there is no core at the moment.
        ready: what the present core said when it was up, or the one before it.
        welcome: what the first core said.
    """

    def __init__(self, socket: Path, *, name: str, silence_s: float | None, return_s: float, ears: Ears) -> None:
        self.fatal: wire.Fatal | None = None
        self.lost: wire.Fatal | None = None
        self.ready: wire.Ready | None = None
        self.welcome: wire.Welcome | None = None
        self._socket = socket
        self._name = name
        self._silence_s = silence_s
        self._return_s = return_s
        self._ears = ears
        self._welcomed = asyncio.Event()
        self._settled = asyncio.Event()
        self._returning: asyncio.Task[None] | None = None
        self._owner = Owner()
        self._connection = self._connect()

    async def open(self, deadline_s: float) -> None:
        """Wait for the welcome.

        Raises:
            EngineTimeout: no core answered.
            EngineDead: it speaks another protocol, or is gone.
        """
        await self._wait(self._welcomed, f"the welcome of the engine core at {self._socket}", deadline_s)

    async def wait_ready(self, deadline_s: float) -> wire.Ready:
        """Wait until the engine takes requests.

        Raises:
            EngineDead: it ended instead.
            EngineTimeout: `deadline_s` passed.
        """
        await self._wait(self._settled, "the engine's readiness", deadline_s)
        assert self.ready is not None
        return self.ready

    def send(self, message: wire.ClientToCore) -> None:
        """Hand a message to the socket, without waiting.

        Raises:
            EngineDead: there is no core, or none at the moment.
            Backpressure: it does not read.
        """
        gone = self.fatal or self.lost
        if gone is not None:
            raise EngineDead(gone.message, gone.code)
        self._connection.send(message)

    @property
    def silent_s(self) -> float:
        """Seconds since the core said something, in turns of this loop."""
        return self._connection.silent_s

    def cut(self, fatal: wire.Fatal) -> None:
        """Someone knows better that this core is lost, or that all is over."""
        if fatal.final:
            self._end(fatal)
        else:
            self._connection.die(fatal.code, fatal.message)

    async def close(self) -> None:
        """Say good-bye; a second call does nothing."""
        returning, self._returning = self._returning, None
        if returning is not None:
            returning.cancel()
            await asyncio.gather(returning, return_exceptions=True)
        await self._connection.close()
        self._end(wire.Fatal("internal", "the client was closed"))
        self._owner.close()

    def _connect(self) -> Connection:
        connection = Connection(
            self._socket, on_message=self._handle, on_dead=self._dead, before_ping=self._ears.before_ping
        )
        connection.send(wire.Hello(wire.PROTOCOL, self._name))
        return connection

    async def _wait(self, event: asyncio.Event, what: str, deadline_s: float) -> None:
        try:
            await asyncio.wait_for(event.wait(), deadline_s)
        except TimeoutError as error:
            raise EngineTimeout(what, deadline_s) from error
        if self.fatal is not None:
            raise EngineDead(self.fatal.message, self.fatal.code)

    def _handle(self, message: wire.CoreToClient) -> None:
        match message:
            case wire.Welcome():
                self._on_welcome(message)
            case wire.Ready():
                self.ready, self.lost = message, None
                self._settled.set()
                self._ears.ready(message)
            case _:
                self._ears.message(message)

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        if welcome.protocol != wire.PROTOCOL:
            known = f"the engine core speaks protocol {welcome.protocol}, this client {wire.PROTOCOL}"
            self._connection.die("protocol", known, final=True)
        elif self.welcome is None:
            self.welcome = welcome
        elif welcome.config_hash != self.welcome.config_hash:
            self._connection.die("protocol", "another engine answers on the socket", final=True)
        if self.fatal is None:
            self._owner.know(welcome.owner_pid)
            silence = self._silence_s if self._silence_s is not None else welcome.step_timeout or DEFAULT_SILENCE_S
            self._connection.start_pings(silence)
        self._welcomed.set()

    # Losses.

    def _dead(self, fatal: wire.Fatal) -> None:
        """A connection is dead: another one follows, unless all is over."""
        if fatal.final or self.welcome is None or self._return_s <= 0:
            self._end(fatal)
            return
        if self._returning is not None and not self._returning.done():
            return  # It looks again by itself.
        self._settled.clear()
        first = self.lost is None
        self.lost = fatal if self.lost is None else self.lost
        self._returning = asyncio.get_running_loop().create_task(self._return(time.monotonic() + self._return_s))
        self._returning.add_done_callback(self._returned)
        if first:
            self._ears.lost(fatal)

    def _returned(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._end(wire.Fatal("internal", f"client: {error}"))

    async def _return(self, deadline: float) -> None:
        """Connect until a core says welcome. What it says after that is handled as ever."""
        assert self.lost is not None
        self._welcomed.clear()
        while self.fatal is None and not self._welcomed.is_set():
            if self._connection.fatal is not None:
                await self._connection.close()
                self._connection = self._connect()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._welcomed.wait(), LOOK_S)
            if self._welcomed.is_set() and self._connection.fatal is None:
                return
            if self._owner.gone():
                self._end(wire.Fatal("internal", f"{self.lost.message}; the server has ended"))
            elif time.monotonic() > deadline:
                why = f"{self.lost.message}; no other core came within {self._return_s:g} s"
                self._end(wire.Fatal("internal", why))
            elif self._connection.fatal is not None:
                self._welcomed.clear()

    def _end(self, fatal: wire.Fatal) -> None:
        if self.fatal is not None:
            return
        self.fatal, self.lost = fatal, None
        self._welcomed.set()
        self._settled.set()
        self._ears.ended(fatal)


class Owner:
    """The process that would start another core.

    It is watched by a descriptor: a process id may be given to another process, a descriptor stays what it is.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._descriptor = -1

    def know(self, pid: int) -> None:
        """Watch this process from now on; 0, one that cannot be seen from here, and this one are not watched."""
        if pid in (self._pid, os.getpid(), 0):
            return
        self.close()
        with contextlib.suppress(OSError):
            self._descriptor, self._pid = os.pidfd_open(pid), pid

    def gone(self) -> bool:
        """Whether it has ended; False when nothing is known of it."""
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._pid = -1, 0
