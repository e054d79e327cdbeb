"""The HTTP server: uvicorn over bounded connections, with our own handling of signals."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import uvicorn

from frontend.errors import PortUnavailable
from frontend.http_protocol import BoundedProtocol, Cuts, HttpLimits

BACKLOG: Final = 2048
CLOSE_S: Final = 2
CHECK_S: Final = 1.0
# uvicorn ticks ten times a second.
TICKS_A_CHECK: Final = 10
CHECKS_A_REPORT: Final = 10
# A check this late means that the process itself was stopped, or held up.
LATE_S: Final = 2.0
# Descriptors for everything but HTTP connections: sockets of the engine, its replacement, files.
RESERVED_DESCRIPTORS: Final = 64
MAX_CONNECTIONS: Final = 65_536
# Bytes that the system may hold for a client that does not read; the system's own limit is 16 times that.
SEND_BUFFER: Final = 262_144
# A peer that vanished: probes begin after KEEP_IDLE_S of silence; bytes must be acknowledged within USER_TIMEOUT_MS.
KEEP_IDLE_S: Final = 30
KEEP_INTERVAL_S: Final = 10
KEEP_COUNT: Final = 3
USER_TIMEOUT_MS: Final = 60_000


class HttpServer(uvicorn.Server):
    """uvicorn's server; signals are the caller's.

    Args:
        config: of uvicorn.
        cuts: the count of ended connections.
    """

    def __init__(self, config: uvicorn.Config, cuts: Cuts) -> None:
        super().__init__(config)
        self.cuts = cuts
        self._checked_at: float | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Hold all connections to their limits about once a second."""
        if counter % TICKS_A_CHECK == 0:
            self._check()
        if counter % (TICKS_A_CHECK * CHECKS_A_REPORT) == 0:
            self.cuts.report()
        return await super().on_tick(counter)

    def _check(self) -> None:
        connections = cast("list[BoundedProtocol]", list(self.server_state.connections))
        if not connections:
            self._checked_at = None
            return
        now = connections[0].loop.time()
        late = 0.0 if self._checked_at is None else now - self._checked_at - CHECK_S
        self._checked_at = now
        for connection in connections:
            if late > LATE_S:
                connection.forgive(late)
            else:
                connection.check(now)


def make_server(
    app: Any,  # noqa: ANN401 - an ASGI application
    limits: HttpLimits | None = None,
    on_cut: Callable[[str], None] = lambda _: None,
) -> HttpServer:
    """A server for `app`, to be run with `serve(sockets=[...])`.

    Args:
        app: the application.
        limits: of each connection; default: HttpLimits with as many connections as there are descriptors.
        on_cut: called with the reason for each connection that the server ends.
    """
    cuts = Cuts(on_cut)
    limits = limits or HttpLimits(connections=connection_limit())
    config = uvicorn.Config(
        app,
        loop="none",
        http=cast("type[BoundedProtocol]", partial(BoundedProtocol, limits=limits, cuts=cuts)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(limits.idle_s),
        timeout_graceful_shutdown=CLOSE_S,
        backlog=BACKLOG,
    )
    return HttpServer(config, cuts)


def raise_descriptor_limit() -> None:
    """Let the process open as many descriptors as it may; each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit() -> int:
    """How many connections the process has descriptors for, beside what it needs itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - RESERVED_DESCRIPTORS))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; connections inherit its options.

    Raises:
        PortUnavailable: the address is unknown or taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise PortUnavailable(host, port, getattr(error, "strerror", None) or str(error)) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_options(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PortUnavailable(host, port, error.strerror or str(error)) from error
    listener.setblocking(False)
    return listener


def _set_options(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEP_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEP_INTERVAL_S),
        (socket.TCP_KEEPCNT, KEEP_COUNT),
        (socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
