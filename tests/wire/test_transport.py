"""Sockets: bounded, private, and honest about peers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from engine_core.wire.errors import Backpressure, SocketPathTooLong
from engine_core.wire.transport import (
    DEALER_QUEUE,
    MAX_FRAME_BYTES,
    MAX_SOCKET_PATH_BYTES,
    ROUTER_QUEUE,
    SEND_QUEUE,
    bind_router,
    configure,
    connect_dealer,
    ipc_address,
    receive_now,
    send_now,
)

DEADLINE_S = 10.0


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket, bytes]]:
    """A ROUTER, a DEALER connected to it, and the DEALER's identity."""
    context = zmq.asyncio.Context()
    try:
        router = bind_router(context, folder / "s")
        dealer = connect_dealer(context, folder / "s")
        send_now(dealer, b"hello")
        identity, body = await asyncio.wait_for(router.recv_multipart(), DEADLINE_S)
        assert body == b"hello"
        yield router, dealer, identity
    finally:
        context.destroy(linger=0)


async def send_for(seconds: float, router: zmq.asyncio.Socket, identity: bytes) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < deadline:
        send_now(router, identity, b"body")
        await asyncio.sleep(0.001)


def send_many(count: int, router: zmq.asyncio.Socket, identity: bytes) -> None:
    for _ in range(count):
        send_now(router, identity, bytes(4096))


def test_a_path_that_fits(tmp_path: Path) -> None:
    fits = tmp_path / ("x" * (MAX_SOCKET_PATH_BYTES - len(str(tmp_path)) - 1))
    assert ipc_address(fits) == f"ipc://{fits}"


@pytest.mark.parametrize("name", ["x" * 108, "\u00e9" * 54])
def test_a_path_that_the_kernel_would_cut(name: str) -> None:
    with pytest.raises(SocketPathTooLong, match="108 bytes, at most 107") as refused:
        ipc_address(Path(name))
    assert refused.value.limit == MAX_SOCKET_PATH_BYTES


def test_a_path_of_the_longest_length_works(tmp_path: Path) -> None:
    async def talk(folder: Path) -> None:
        async with pair(folder) as (router, dealer, identity):
            send_now(router, identity, b"answer")
            assert await asyncio.wait_for(dealer.recv_multipart(), DEADLINE_S) == [b"answer"]

    folder = tmp_path / ("x" * (MAX_SOCKET_PATH_BYTES - len(str(tmp_path)) - len("/") - len("/s")))
    folder.mkdir()
    assert len(str(folder / "s")) == MAX_SOCKET_PATH_BYTES
    asyncio.run(talk(folder))


def test_a_file_of_an_earlier_server_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "s").touch()

    async def talk() -> None:
        async with pair(tmp_path) as (_, _, identity):
            assert identity

    asyncio.run(talk())


def test_every_socket_is_bounded(tmp_path: Path) -> None:
    async def look() -> None:
        async with pair(tmp_path) as (router, dealer, _):
            for socket, queue in ((router, ROUTER_QUEUE), (dealer, DEALER_QUEUE)):
                assert socket.getsockopt(zmq.LINGER) == 0
                assert socket.getsockopt(zmq.SNDHWM) == SEND_QUEUE
                assert socket.getsockopt(zmq.RCVHWM) == queue
                assert socket.getsockopt(zmq.MAXMSGSIZE) == MAX_FRAME_BYTES == 64 * 2**20
        assert ROUTER_QUEUE * MAX_FRAME_BYTES == 2**30

    asyncio.run(look())


def test_a_peer_that_never_was(tmp_path: Path) -> None:
    async def send() -> None:
        async with pair(tmp_path) as (router, _, _):
            with pytest.raises(Backpressure, match="gone"):
                send_now(router, b"nobody", b"body")

    asyncio.run(send())


def test_a_peer_that_left(tmp_path: Path) -> None:
    async def send() -> None:
        async with pair(tmp_path) as (router, dealer, identity):
            dealer.close(linger=0)
            with pytest.raises(Backpressure, match="gone"):
                await send_for(DEADLINE_S, router, identity)

    asyncio.run(send())


def test_a_peer_that_does_not_read(tmp_path: Path) -> None:
    async def send() -> None:
        async with pair(tmp_path) as (router, _, identity):
            with pytest.raises(Backpressure, match="full"):
                send_many(4 * (SEND_QUEUE + DEALER_QUEUE), router, identity)

    asyncio.run(send())


def test_receive_now_does_not_wait(tmp_path: Path) -> None:
    async def receive() -> None:
        async with pair(tmp_path) as (router, dealer, identity):
            assert receive_now(dealer) is None
            send_now(router, identity, b"one")
            send_now(router, identity, b"two")
            assert await asyncio.wait_for(dealer.recv_multipart(), DEADLINE_S) == [b"one"]
            frames = None
            deadline = asyncio.get_running_loop().time() + DEADLINE_S
            while frames is None and asyncio.get_running_loop().time() < deadline:
                frames = receive_now(dealer)
            assert frames == [b"two"]
            assert receive_now(dealer) is None

    asyncio.run(receive())


def test_large_frames_arrive_whole(tmp_path: Path) -> None:
    """Frames above 64 KiB are not copied by pyzmq: each must be bytes of its own."""

    async def soak() -> None:
        async with pair(tmp_path) as (router, dealer, identity):
            sums: list[bytes] = []
            for round_number in range(20):
                for i in range(20):
                    body = bytes([round_number, i]) * 50_000
                    sums.append(hashlib.sha256(body).digest())
                    send_now(router, identity, body)
                for _ in range(20):
                    (frame,) = await asyncio.wait_for(dealer.recv_multipart(), DEADLINE_S)
                    assert hashlib.sha256(frame).digest() == sums.pop(0)

    asyncio.run(soak())


def test_what_a_flooding_peer_can_leave_here_is_bounded_in_bytes(tmp_path: Path) -> None:
    """Nobody reads: the peer gets rid of what its own queue, the router's and the kernel hold, and of no more."""
    body, kernel = bytes(2**20), 8

    async def flood() -> int:
        context = zmq.asyncio.Context()
        try:
            router = bind_router(context, tmp_path / "s")
            dealer = context.socket(zmq.DEALER)
            configure(dealer)
            dealer.setsockopt(zmq.SNDHWM, 1)
            dealer.connect(ipc_address(tmp_path / "s"))
            sent, patience = 0, asyncio.get_running_loop().time() + 1.0
            # A second in which nothing leaves: what can be taken has been taken.
            while asyncio.get_running_loop().time() < patience:
                with contextlib.suppress(Backpressure):
                    send_now(dealer, body)
                    sent, patience = sent + 1, asyncio.get_running_loop().time() + 1.0
                assert sent <= 10 * ROUTER_QUEUE
                await asyncio.sleep(0)
            assert router.getsockopt(zmq.EVENTS)
            return sent
        finally:
            context.destroy(linger=0)

    assert ROUTER_QUEUE <= asyncio.run(flood()) <= ROUTER_QUEUE + 2 + kernel
