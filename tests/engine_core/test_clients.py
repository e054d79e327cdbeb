"""Who is a client, what is taken from whom, and when one is lost. Real sockets; time is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from engine_core.clients import BATCH, BATCH_BYTES, Clients
from engine_core.wire import codec
from engine_core.wire.client import (
    CLIENT_SILENCE_S,
    Abort,
    Bye,
    ClientToCore,
    CoreToClient,
    Fatal,
    Hello,
    Output,
    Outputs,
    Ping,
    Rejected,
    Status,
    Submit,
)
from engine_core.wire.sampling import SamplingParams
from engine_core.wire.transport import CORE_SOCKET, bind_router, connect_dealer

DEADLINE_S = 10.0


class Peer:
    """The other end: a DEALER with an identity of its own."""

    def __init__(self, context: zmq.asyncio.Context, folder: Path) -> None:
        self.socket = connect_dealer(context, folder / CORE_SOCKET)
        self._incoming = codec.core_to_client()
        self._outgoing = codec.client_to_core()

    async def send(self, *messages: ClientToCore | bytes) -> None:
        for message in messages:
            await self.socket.send(message if isinstance(message, bytes) else self._outgoing.encode(message))

    async def receive(self) -> CoreToClient:
        return self._incoming.decode(await asyncio.wait_for(self.socket.recv(), DEADLINE_S))


class Desk:
    """Clients, and peers that talk to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = zmq.asyncio.Context()
        self._peers: list[Peer] = []
        self.clients = Clients(bind_router(self._context, folder / CORE_SOCKET))

    def peer(self) -> Peer:
        self._peers.append(Peer(self._context, self._folder))
        return self._peers[-1]

    async def take(self, count: int, now: float = 0.0) -> list[tuple[bytes, ClientToCore] | None]:
        """What the next `count` frames were taken for; those who say hello are admitted."""
        taken: list[tuple[bytes, ClientToCore] | None] = []
        while len(taken) < count:
            for frames in await asyncio.wait_for(self.clients.receive(), DEADLINE_S):
                got = self.clients.take(frames, now)
                if got is not None and isinstance(got[1], Hello):
                    self.clients.admit(got[0], got[1].name, now)
                taken.append(got)
        return taken

    async def admitted(self, now: float = 0.0) -> tuple[Peer, bytes]:
        """A new client and its identity."""
        peer = self.peer()
        await peer.send(Hello(1, "test"))
        (got,) = await self.take(1, now)
        assert got is not None
        return peer, got[0]

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def open_desk(folder: Path) -> AsyncIterator[Desk]:
    desk = Desk(folder)
    try:
        yield desk
    finally:
        desk.close()


Scenario = Callable[[Desk], Coroutine[Any, Any, None]]


def play(folder: Path, scenario: Scenario) -> None:
    async def run() -> None:
        async with open_desk(folder) as desk:
            await scenario(desk)

    asyncio.run(run())


def test_messages_come_in_order_with_their_sender(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        peer, identity = await desk.admitted()
        sent: list[ClientToCore] = [Ping(1), Abort(["a"]), Submit("a", b"", SamplingParams()), Bye()]
        await peer.send(*sent)
        assert await desk.take(4) == [(identity, message) for message in sent]
        assert len(desk.clients) == 1

    play(tmp_path, scenario)


def test_a_batch_is_bounded(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        peer, _ = await desk.admitted()
        await peer.send(*[Ping(seq) for seq in range(3 * BATCH)])
        seen = 0
        while seen < 3 * BATCH:
            batch = await asyncio.wait_for(desk.clients.receive(), DEADLINE_S)
            assert 1 <= len(batch) <= BATCH
            seen += len(batch)

    play(tmp_path, scenario)


def test_a_batch_of_large_frames_is_bounded_too(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        peer, _ = await desk.admitted()
        large = BATCH_BYTES // 2
        await peer.send(*[bytes(large)] * 7)
        seen = 0
        while seen < 7:
            batch = await asyncio.wait_for(desk.clients.receive(), DEADLINE_S)
            assert 1 <= len(batch) <= 2
            seen += len(batch)

    play(tmp_path, scenario)


def test_strangers_are_not_heard(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        stranger = desk.peer()
        await stranger.send(Ping(1), Submit("a", b"", SamplingParams()), b"\xc1")
        assert await desk.take(3) == [None] * 3
        assert (desk.clients.malformed, desk.clients.invalid, len(desk.clients)) == (3, 0, 0)

    play(tmp_path, scenario)


def test_an_invalid_submission_is_answered(tmp_path: Path) -> None:
    """Its client would wait for ever."""

    async def scenario(desk: Desk) -> None:
        peer, _ = await desk.admitted()
        await peer.send(Submit("a", b"", SamplingParams(temperature=5.0)))
        assert await desk.take(1) == [None]
        answer = await peer.receive()
        assert isinstance(answer, Rejected)
        assert (answer.request_id, answer.code) == ("a", "invalid")
        assert "2.0" in answer.message
        assert (desk.clients.malformed, desk.clients.invalid) == (1, 1)

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    "frame",
    [
        msgspec.msgpack.encode(["submit", "", b"", []]),
        msgspec.msgpack.encode(["submit", "x" * 129, b"", []]),
        msgspec.msgpack.encode(["submit", 7, b"", []]),
        msgspec.msgpack.encode(["submit", "a", b"", []])[:-1],
        msgspec.msgpack.encode(["submit"]),
        b"\x92\xa6submit\xa2\xff\xfe",
        b"",
    ],
)
def test_what_names_no_request_is_only_counted(tmp_path: Path, frame: bytes) -> None:
    async def scenario(desk: Desk) -> None:
        peer, _ = await desk.admitted()
        await peer.send(frame)
        assert await desk.take(1) == [None]
        assert (desk.clients.malformed, desk.clients.invalid, len(desk.clients)) == (1, 0, 1)

    play(tmp_path, scenario)


def test_a_step_is_one_message_a_client(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        (one, first), (other, second) = await desk.admitted(), await desk.admitted()
        a, b, c = Output("a", [1]), Output("a", [2]), Output("b", [3])
        desk.clients.publish(7, [((first, "a"), a), ((second, "a"), b), ((first, "b"), c)])
        assert await one.receive() == Outputs(7, [a, c])
        assert await other.receive() == Outputs(7, [b])

    play(tmp_path, scenario)


def test_a_client_that_was_removed_and_does_not_know_it_is_told(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        (removed, identity), _ = await desk.admitted(now=100.0), await desk.admitted(now=100.0)
        desk.clients.remove(identity, "its queue is full")
        await removed.send(Ping(1))
        await desk.take(1, now=101.0)
        told = await removed.receive()
        assert told == Fatal("protocol", "client: removed: its queue is full", final=False)
        # Once; after that it is a stranger as any other.
        malformed = desk.clients.malformed
        await removed.send(Ping(2))
        await desk.take(1, now=102.0)
        assert desk.clients.malformed == malformed + 1

    play(tmp_path, scenario)


def test_a_silent_client_is_lost_and_told(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        (silent, lost), (talker, _) = await desk.admitted(now=100.0), await desk.admitted(now=100.0)
        await talker.send(Ping(1))
        await desk.take(1, now=105.0)
        desk.clients.sweep(100.0 + CLIENT_SILENCE_S)
        assert desk.clients.take_lost() == []
        desk.clients.sweep(100.5 + CLIENT_SILENCE_S)
        assert desk.clients.take_lost() == [lost]
        assert desk.clients.take_lost() == []
        assert len(desk.clients) == 1
        told = await silent.receive()
        assert told == Fatal("protocol", "client: silent for 10.5 s, at most 10 s", final=False)

    play(tmp_path, scenario)


def test_silence_is_forgiven_when_nobody_listened(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        _, identity = await desk.admitted(now=100.0)
        desk.clients.forgive(20.0)
        desk.clients.sweep(125.0)
        assert desk.clients.take_lost() == []
        desk.clients.sweep(131.0)
        assert desk.clients.take_lost() == [identity]

    play(tmp_path, scenario)


def test_any_frame_is_a_sign_of_life(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        peer, _ = await desk.admitted(now=100.0)
        await peer.send(b"\xc1")
        await desk.take(1, now=109.0)
        desk.clients.sweep(115.0)
        assert desk.clients.take_lost() == []

    play(tmp_path, scenario)


def test_a_client_that_is_gone_is_lost_when_it_is_sent_to(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        (peer, identity), (other, _) = await desk.admitted(), await desk.admitted()
        peer.socket.close(linger=0)
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        while len(desk.clients) == 2 and asyncio.get_running_loop().time() < deadline:
            desk.clients.broadcast(Status(1, "ready"))
            await asyncio.sleep(0.001)
        assert desk.clients.take_lost() == [identity]
        assert isinstance(await other.receive(), Status)

    play(tmp_path, scenario)


def test_a_client_that_does_not_read_is_lost(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        _, identity = await desk.admitted()
        for _ in range(50_000):
            if not len(desk.clients):
                break
            desk.clients.send(identity, Fatal("internal", "x" * 1000))
        assert desk.clients.take_lost() == [identity]

    play(tmp_path, scenario)


def test_a_stranger_that_does_not_read_is_no_error(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.clients.answer(b"nobody", Fatal("protocol", "who are you"))
        desk.clients.remove(b"nobody", "bye")
        assert desk.clients.take_lost() == []

    play(tmp_path, scenario)
