"""Limits on the head of a request. What time does to connections stands in tests/hostile/test_slow_clients.py."""

from __future__ import annotations

import socket

import pytest

from frontend.http_protocol import MAX_HEADER_BYTES, MAX_HEADERS, HttpLimits
from tests.fakes.live import LiveServer


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A server."""
    with LiveServer(tmp_path_factory.mktemp("live")) as server:
        yield server


def answer_to(live: LiveServer, *chunks: bytes) -> bytes:
    """All that comes back when raw bytes are sent, until the server closes."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        received = b""
        try:
            for chunk in chunks:
                connection.sendall(chunk)
            while part := connection.recv(65536):
                received += part
        except (BrokenPipeError, ConnectionResetError):
            pass
        return received


HEAD = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


def test_heads_within_the_limits(live: LiveServer) -> None:
    lines = b"".join(b"x-%d: y\r\n" % number for number in range(MAX_HEADERS - 2))
    assert answer_to(live, HEAD + lines + b"\r\n").startswith(b"HTTP/1.1 200 ")
    assert answer_to(live, HEAD + b"x-long: " + b"y" * (MAX_HEADER_BYTES - 1000) + b"\r\n\r\n").startswith(
        b"HTTP/1.1 200 "
    )


@pytest.mark.parametrize(
    "lines",
    [
        b"".join(b"x-%d: y\r\n" % number for number in range(5000)) + b"\r\n",
        b"x-request-id: " + b"y" * 1_000_000 + b"\r\n\r\n",
    ],
    ids=["many", "long"],
)
def test_heads_over_the_limits(live: LiveServer, lines: bytes) -> None:
    assert answer_to(live, HEAD + lines)[:13] in (b"HTTP/1.1 431 ", b"")
    assert live.complete("a", max_tokens=1)["choices"]


def test_a_header_that_never_ends(live: LiveServer) -> None:
    assert answer_to(live, HEAD + b"x-long: ", *[b"y" * 1000] * 100)[:13] in (b"HTTP/1.1 431 ", b"")


def test_a_path_that_is_too_long(live: LiveServer) -> None:
    head = b"GET /" + b"a" * (MAX_HEADER_BYTES + 10) + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    assert answer_to(live, head)[:13] in (b"HTTP/1.1 431 ", b"")


@pytest.mark.parametrize(
    "data",
    [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /\xff HTTP/1.1\r\n\r\n", b"A" * 100_000],
)
def test_bytes_that_are_no_request(live: LiveServer, data: bytes) -> None:
    assert answer_to(live, data)[:11] in (b"HTTP/1.1 4" + b"0", b"HTTP/1.1 43", b"")
    assert live.http.get("/live").status_code == 200


def test_large_bodies_do_not_count_as_heads(live: LiveServer) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "user": "%b"}' % (b"x" * 1_000_000)
    for _ in range(3):
        assert live.post("/v1/completions", body).status_code == 200


def test_connections_live_long_between_requests(live: LiveServer) -> None:
    assert HttpLimits().idle_s >= 75
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        for _ in range(3):
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(4096)
            assert received.startswith(b"HTTP/1.1 200 ")
