"""The clients of the engine core: who they are, what they sent, and what is sent to them.

A client is known from its Hello until it says Bye, falls silent, or stops reading. What strangers send, other than a
Hello, is dropped and counted, as are frames that are no messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Final

import msgspec
import zmq.asyncio
from msgspec import Struct

from engine_core.wire import codec
from engine_core.wire.client import (
    CLIENT_SILENCE_S,
    ClientToCore,
    CoreToClient,
    Fatal,
    Hello,
    Output,
    Outputs,
    Rejected,
    RequestId,
)
from engine_core.wire.errors import Backpressure, MalformedFrame
from engine_core.wire.transport import receive_now, send_now

log = logging.getLogger(__name__)

# Frames taken in one go; the executor's results get their turn in between.
BATCH: Final = 256
BATCH_BYTES: Final = 8 * 2**20
# Clients removed against their will that are remembered, to be told should they go on talking.
REMEMBERED: Final = 64


class _SubmitHead(Struct, array_like=True, tag="submit"):
    """The beginning of a Submit whose rest is not valid."""

    request_id: RequestId


class _Client:
    """One client: its name for the log, and when it last sent something."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.seen = now


class Clients:
    """All clients, behind one ROUTER socket.

    Args:
        socket: the bound ROUTER.

    Attributes:
        malformed: frames dropped.
        invalid: submissions refused because they did not decode.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._incoming = codec.client_to_core()
        self._outgoing = codec.core_to_client()
        self._submit_head = msgspec.msgpack.Decoder(_SubmitHead)
        self._known: dict[bytes, _Client] = {}
        self._lost: list[bytes] = []
        self._removed: dict[bytes, str] = {}
        self._greeted = asyncio.Event()
        self.malformed = 0
        self.invalid = 0

    def __len__(self) -> int:
        return len(self._known)

    async def receive(self) -> list[list[bytes]]:
        """Wait for a message, then collect what else is there, until it is BATCH messages or BATCH_BYTES; `take` is
        called on each, in order.
        """
        batch = [await self._socket.recv_multipart()]
        size = _size(batch[0])
        while len(batch) < BATCH and size < BATCH_BYTES and (frames := receive_now(self._socket)) is not None:
            batch.append(frames)
            size += _size(frames)
        return batch

    def take(self, frames: list[bytes], now: float) -> tuple[bytes, ClientToCore] | None:
        """Identity and message, None for what is dropped. Hellos come from anyone, all else from known clients only."""
        identity = frames[0]
        client = self._known.get(identity)
        if client is not None:
            client.seen = now
        try:
            message = self._decode(frames)
        except MalformedFrame as error:
            self._drop(identity, str(error))
            if client is not None:
                self._refuse(identity, frames[-1], error)
            return None
        if client is None and not isinstance(message, Hello):
            if identity in self._removed:
                self._tell_removed(identity)
                return None
            self._drop(identity, f"{type(message).__name__} before a hello")
            return None
        return identity, message

    def admit(self, identity: bytes, name: str, now: float) -> None:
        """Take a client in; one that says hello again stays."""
        self._known[identity] = _Client(name, now)
        self._greeted.set()
        self._removed.pop(identity, None)
        log.info("client %s (%s) connected; %d now", identity.hex(), name, len(self._known))

    async def somebody(self, seconds: float) -> None:
        """Wait until a first client has been admitted, for at most `seconds`; somebody else receives meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._greeted.wait()

    def remove(self, identity: bytes, why: str) -> None:
        """Forget a client; it is among the lost from now on."""
        client = self._known.pop(identity, None)
        if client is not None:
            self._lost.append(identity)
            self._removed[identity] = why
            while len(self._removed) > REMEMBERED:
                del self._removed[next(iter(self._removed))]
            log.info("client %s (%s) removed: %s", identity.hex(), client.name, why)

    def take_lost(self) -> list[bytes]:
        """The clients removed since the last call: their requests must end."""
        lost, self._lost = self._lost, []
        return lost

    def sweep(self, now: float) -> None:
        """Remove the clients that have been silent for too long, and tell them should they wake up."""
        for identity, client in list(self._known.items()):
            if now - client.seen > CLIENT_SILENCE_S:
                why = f"client: silent for {now - client.seen:.1f} s, at most {CLIENT_SILENCE_S:g} s"
                self.remove(identity, why)
                # One that only slept says hello again, and goes on.
                self.answer(identity, Fatal("protocol", why, final=False))
                del self._removed[identity]

    def forgive(self, seconds: float) -> None:
        """The core itself was stopped for this long: that silence was not the clients'."""
        for client in self._known.values():
            client.seen += seconds

    def _tell_removed(self, identity: bytes) -> None:
        """A client that does not know yet that it was removed: it says hello again, and submits what is open anew."""
        fatal = Fatal("protocol", f"client: removed: {self._removed[identity]}", final=False)
        try:
            send_now(self._socket, identity, self._outgoing.encode(fatal))
        except Backpressure:
            return
        del self._removed[identity]

    def send(self, identity: bytes, message: CoreToClient) -> None:
        """Send to a client; one that does not read, or is gone, is removed."""
        try:
            send_now(self._socket, identity, self._outgoing.encode(message))
        except Backpressure as error:
            self.remove(identity, str(error))

    def answer(self, identity: bytes, message: CoreToClient) -> None:
        """Send to a peer that is, or will be, no client; whether it reads is its own affair."""
        try:
            send_now(self._socket, identity, self._outgoing.encode(message))
        except Backpressure as error:
            log.debug("peer %s: %s", identity.hex(), error)

    def broadcast(self, message: CoreToClient) -> None:
        """Send to every client."""
        for identity in list(self._known):
            self.send(identity, message)

    def publish(self, step: int, outputs: Iterable[tuple[tuple[bytes, str], Output]]) -> None:
        """Send what a step gave: one message for each client that has a part in it."""
        shares: dict[bytes, list[Output]] = {}
        for (identity, _), output in outputs:
            shares.setdefault(identity, []).append(output)
        for identity, items in shares.items():
            self.send(identity, Outputs(step, items))

    def close(self, linger_ms: int) -> None:
        """Close the socket; what is queued has `linger_ms` to leave."""
        self._socket.close(linger=linger_ms)

    def _decode(self, frames: list[bytes]) -> ClientToCore:
        if len(frames) != 2:
            raise MalformedFrame(f"client to core: {len(frames)} frames, expected 2")
        return self._incoming.decode(frames[1])

    def _drop(self, identity: bytes, why: str) -> None:
        self.malformed += 1
        level = logging.WARNING if self.malformed == 1 else logging.DEBUG
        log.log(level, "dropped a frame of %s: %s", identity.hex(), why)

    def _refuse(self, identity: bytes, frame: bytes, error: MalformedFrame) -> None:
        """A submission that is invalid in a later field is answered: its client waits for it."""
        try:
            request_id = self._submit_head.decode(frame).request_id
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        self.invalid += 1
        self.send(identity, Rejected(request_id, "invalid", str(error)))


def _size(frames: list[bytes]) -> int:
    return sum(map(len, frames))
