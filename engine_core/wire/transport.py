"""ZeroMQ sockets as this server uses them: unix sockets in a private directory, bounded, without linger.

Frames: a ROUTER sees [identity, body], a DEALER sees [body]; one message a frame, never more.

Bound in bytes: ZeroMQ counts messages, so what may wait is their number times the size of the largest. A peer of a
ROUTER can have ROUTER_QUEUE * MAX_FRAME_BYTES (1 GiB) waiting here, whatever it sends; what goes beyond waits on its
own side. A DEALER hears its core alone, whose messages are as large as what a step gives.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import zmq
import zmq.asyncio

from engine_core.wire.errors import Backpressure, SocketPathTooLong

SEND_QUEUE = 4096
DEALER_QUEUE = 4096
ROUTER_QUEUE = 16
MAX_FRAME_BYTES = 64 * 2**20
# sun_path holds 108 bytes with the closing zero.
MAX_SOCKET_PATH_BYTES = 107
CORE_SOCKET = "core.sock"
EXECUTOR_SOCKET = "executor.sock"


def ipc_address(path: Path) -> str:
    """The ZeroMQ address of a unix socket.

    Raises:
        SocketPathTooLong: the kernel would cut the path.
    """
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise SocketPathTooLong(str(path), MAX_SOCKET_PATH_BYTES)
    return f"ipc://{path}"


def configure(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, receive_queue: int = DEALER_QUEUE) -> None:
    """Bounds every socket has: queue lengths, frame size, and no bytes kept after close."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    socket.setsockopt(zmq.RCVHWM, receive_queue)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


def bind_router(context: zmq.asyncio.Context, path: Path) -> zmq.asyncio.Socket:
    """A ROUTER bound at `path`; a send to a peer that is gone or full raises instead of vanishing."""
    socket = context.socket(zmq.ROUTER)
    configure(socket, ROUTER_QUEUE)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    path.unlink(missing_ok=True)
    socket.bind(ipc_address(path))
    # Whatever the umask says: whoever may connect may submit.
    path.chmod(0o600)
    return socket


def connect_dealer(context: zmq.asyncio.Context, path: Path) -> zmq.asyncio.Socket:
    """A DEALER connected to the ROUTER at `path`."""
    socket = context.socket(zmq.DEALER)
    configure(socket)
    socket.connect(ipc_address(path))
    return socket


def send_now(socket: zmq.asyncio.Socket, *frames: bytes) -> None:
    """Hand frames to the queue of `socket` without waiting.

    Raises:
        Backpressure: the peer's queue is full, or the peer is gone.
    """
    # With DONTWAIT pyzmq tries at once and hands back a future that is done.
    sent = cast("asyncio.Future[object]", socket.send_multipart(frames, flags=zmq.DONTWAIT))
    try:
        sent.result()
    except zmq.Again as error:
        raise Backpressure("the peer's queue is full") from error
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise Backpressure("the peer is gone") from error
        raise


def receive_now(socket: zmq.asyncio.Socket) -> list[bytes] | None:
    """The frames of a message that is there already; None when there is none."""
    taken = cast("asyncio.Future[list[bytes]]", socket.recv_multipart(flags=zmq.DONTWAIT))
    try:
        return taken.result()
    except zmq.Again:
        return None
