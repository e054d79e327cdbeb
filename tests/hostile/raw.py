"""HTTP by hand over a socket, for clients that no library can be made to be."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Literal, Protocol

Leaving = Literal["fin", "rst"]


class Dial(Protocol):
    """Makes a connection that somebody else closes."""

    def __call__(self, url: str, receive_buffer: int | None = None) -> socket.socket:
        """The connection."""


def connect(url: str, *, receive_buffer: int | None = None) -> socket.socket:
    """A connection to a server."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(10)
    connection.connect((host, int(port)))
    return connection


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """The bytes of a POST."""
    content = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(content), content)


def leave(connection: socket.socket, how: Leaving) -> None:
    """Hang up, politely or not."""
    if how == "rst":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received
