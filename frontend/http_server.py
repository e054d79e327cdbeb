"""The HTTP server: uvicorn with bounds on headers, our own handling of signals, and a way to drop a connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from frontend.api.errors import INVALID, ErrorAnswer, ErrorBody
from frontend.api.exchange import ABORT_EXTENSION
from frontend.errors import PortUnavailable

KEEP_ALIVE_S: Final = 120
MAX_HEADER_BYTES: Final = 65_536
MAX_HEADERS: Final = 128
BACKLOG: Final = 2048
CLOSE_S: Final = 2


class HeadersTooLarge(Exception):
    """The head of a request passes a limit."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the head of a request.

    The parser keeps an unfinished header to itself, so the bytes that came in are counted, not the headers it gave.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own signature
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._ended = 0
        self._too_large = False

    def data_received(self, data: bytes) -> None:
        """Parse, unless the head is already too large."""
        if self.transport.is_closing():
            return
        before, ended = self._head_bytes, self._ended
        super().data_received(data)
        # Where a request ended in these bytes, most of them were its body.
        if self._in_head and self._ended == ended and not self.transport.is_closing():
            self._head_bytes = before + len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self._too_large = True
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self.scope["extensions"] = {ABORT_EXTENSION: {"call": self.transport.abort}}

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header."""
        self._head_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._head_bytes > MAX_HEADER_BYTES:
            self._too_large = True
            raise HeadersTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is done."""
        self._in_head = False
        if len(self.url) > MAX_HEADER_BYTES:
            self._too_large = True
            raise HeadersTooLarge
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is done; the next one's head begins."""
        super().on_message_complete()
        self._ended += 1
        self._in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, in the shape of all errors, and close."""
        if self.transport.is_closing():
            return
        status, reason = ("431", "Request Header Fields Too Large") if self._too_large else ("400", "Bad Request")
        text = f"the head of a request is at most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes"
        body = msgspec.json.encode(ErrorAnswer(ErrorBody(text if self._too_large else msg, INVALID, None, None)))
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn's server; signals are the caller's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


def make_server(app: Any) -> HttpServer:  # noqa: ANN401 - an ASGI application
    """A server for `app`, to be run with `serve(sockets=[...])`."""
    config = uvicorn.Config(
        app,
        loop="none",
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
        backlog=BACKLOG,
    )
    return HttpServer(config)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        PortUnavailable: the address is unknown or taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise PortUnavailable(host, port, error.strerror or str(error)) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PortUnavailable(host, port, error.strerror or str(error)) from error
    listener.setblocking(False)
    return listener
