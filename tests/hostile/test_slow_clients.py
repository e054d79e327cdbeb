"""Clients that dawdle: each limit of time and size ends the connection, is counted by name, and hurts no one else."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.config import HttpOptions
from frontend.http_protocol import Cuts, HttpLimits
from tests.fakes.live import LiveServer, eventually, strict
from tests.hostile.raw import Dial, read_all, request

LIMITS = HttpLimits(
    idle_s=1.0, head_s=0.5, body_s=0.5, body_rate=10_000.0, stall_s=1.0, close_s=1.0, discard_bytes=50_000
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with little patience."""
    with LiveServer(tmp_path_factory.mktemp("impatient"), limits=LIMITS) as server:
        yield server


def cuts(live: LiveServer, reason: str) -> float:
    return live.metric("tercet_http_connections_ended_total", reason=reason)


def drip(connection: socket.socket, data: bytes, count: int) -> None:
    """Send the same bytes again and again, every 50 ms, until the server has had enough."""
    try:
        for _ in range(count):
            connection.sendall(data)
            time.sleep(0.05)
    except (BrokenPipeError, ConnectionResetError):
        pass


def send_many(connection: socket.socket, data: bytes, count: int) -> None:
    for _ in range(count):
        connection.sendall(data)


@pytest.mark.parametrize(
    ("begin", "more", "reason"),
    [
        (b"GET /live HTTP/1.1\r\n", b"x-a: b\r\n", "slow_head"),
        (b"", b"\r\n", "slow_head"),
        (b"GET /", b"a", "slow_head"),
        (HEAD + b"content-length: 100000\r\n\r\n", b"x", "slow_body"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n", "slow_body"),
    ],
)
def test_what_comes_drop_by_drop_is_cut(live: LiveServer, begin: bytes, more: bytes, reason: str, dial: Dial) -> None:
    before = cuts(live, reason)
    connection = dial(live.url)
    connection.sendall(begin)
    drip(connection, more, 100)
    answer = read_all(connection)
    if answer:
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert strict(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == reason
    eventually(lambda: cuts(live, reason) == before + 1, "it is counted")
    eventually(lambda: len(live.service.running) == 0, "nothing waits for it")
    assert live.complete("a", max_tokens=1)["choices"]


def test_a_body_that_keeps_coming_is_read(live: LiveServer, dial: Dial) -> None:
    connection = dial(live.url)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 40_000}).encode()
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body))
    for start in range(0, len(body), 2000):
        connection.sendall(body[start : start + 2000])
        time.sleep(0.05)
    # More than body_s, but faster than body_rate.
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_silent_connections_end(live: LiveServer, dial: Dial) -> None:
    before = cuts(live, "idle")
    fresh, used = dial(live.url), dial(live.url)
    used.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert used.recv(4096).startswith(b"HTTP/1.1 200 ")
    for connection in (fresh, used):
        assert read_all(connection) == b""
    assert cuts(live, "idle") >= before + 2


def test_connections_live_between_requests(live: LiveServer, dial: Dial) -> None:
    """Several times the idle limit in all, with pauses shorter than it."""
    connection = dial(live.url)
    for _ in range(4):
        time.sleep(0.5)
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_long_answer_is_no_idle_connection(live: LiveServer, dial: Dial) -> None:
    live.call(live.core.gate.clear)
    connection = dial(live.url)
    connection.sendall(request({"prompt": "a", "max_tokens": 2}))
    time.sleep(LIMITS.idle_s * 2)
    live.call(live.core.gate.set)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_body_after_its_answer_is_bounded(live: LiveServer, dial: Dial) -> None:
    before = cuts(live, "unread_body")
    connection = dial(live.url)
    connection.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 500000000\r\n\r\n")
    assert connection.recv(4096).startswith(b"HTTP/1.1 404 ")
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_many(connection, b"x" * 1000, 100_000)
    assert cuts(live, "unread_body") == before + 1


@pytest.mark.parametrize("start", [b"0\r\nx-trailer: ", b"1;a="])
def test_chunks_and_trailers_without_end_are_cut(live: LiveServer, start: bytes, dial: Dial) -> None:
    connection = dial(live.url)
    connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + start)
    try:
        for _ in range(400):
            connection.sendall(b"y" * 1000)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert read_all(connection)[:13] in (b"HTTP/1.1 431 ", b"HTTP/1.1 400 ", b"")
    eventually(lambda: len(live.service.running) == 0, "nothing waits for it")
    assert live.complete("a", max_tokens=1)["choices"]


def test_too_much_sent_ahead_is_cut(live: LiveServer, dial: Dial) -> None:
    before = cuts(live, "sent_ahead")
    live.call(live.core.gate.clear)
    connection = dial(live.url)
    connection.sendall(request({**LONG}))
    eventually(lambda: len(live.core.live) == 1, "it runs")
    one = request({**LONG, "user": "x" * 10_000})
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_many(connection, one, 1000)
    eventually(lambda: cuts(live, "sent_ahead") == before + 1, "it is counted")
    eventually(lambda: not live.core.live, "its request ended")
    live.call(live.core.gate.set)


def never_reading(live: LiveServer, dial: Dial, body: dict[str, Any]) -> socket.socket:
    connection = dial(live.url, receive_buffer=32_768)
    connection.sendall(request(body))
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_reads_is_cut(live: LiveServer, stream: bool, dial: Dial) -> None:
    before = cuts(live, "unread_answer")
    connection = never_reading(live, dial, {**LONG, "n": 4, "logprobs": 20, "stream": stream})
    eventually(lambda: cuts(live, "unread_answer") == before + 1, "it is cut", 30.0)
    eventually(lambda: not live.core.live and len(live.service.running) == 0, "nothing is left")
    assert live.client.open_generations == 0
    assert live.complete("a", max_tokens=1)["choices"]
    connection.close()


def test_an_answer_that_is_read_slowly_is_not(live: LiveServer, dial: Dial) -> None:
    connection = never_reading(live, dial, {**LONG, "logprobs": 5})
    received = b""
    while not received.endswith(b"}") or b"completion_tokens" not in received:
        part = connection.recv(8192)
        assert part
        received += part
        time.sleep(0.05)
    assert received.startswith(b"HTTP/1.1 200 ")
    connection.close()


def test_the_backlog_limit_cuts_a_stream_with_a_reason(tmp_path: Path, dial: Dial) -> None:
    options = HttpOptions(max_stream_backlog_bytes=20_000)
    with LiveServer(tmp_path, options=options, max_backlog_bytes=options.max_stream_backlog_bytes) as live:
        live.call(live.core.gate.clear)
        connection = never_reading(live, dial, {**LONG, "n": 8, "logprobs": 5, "stream": True})
        # Tokens come once the stream has begun: before that an error is an answer of its own.
        assert connection.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
        live.call(live.core.gate.set)
        eventually(lambda: cuts(live, "backlog") == 1, "it is counted")
        eventually(lambda: not live.core.live, "the request ended")
        # Whoever reads in the end is told why nothing more comes.
        text = read_until_end(connection)
        last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
        assert "backlog" in last or "waited to be read, at most 20000" in last
        connection.close()


def read_until_end(connection: socket.socket) -> str:
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        part = connection.recv(65536)
        if not part:
            break
        received += part
    return received.decode()


def test_many_that_do_not_read_cost_bounded_memory_and_nobody_s_time(tmp_path: Path, dial: Dial) -> None:
    backlog = 65_536
    with LiveServer(tmp_path, max_backlog_bytes=backlog) as live:
        connections = [never_reading(live, dial, {**LONG, "n": 4, "stream": True}) for _ in range(50)]
        eventually(lambda: len(live.core.submits) == 200, "all are there")
        eventually(lambda: not live.core.live or live.client.open_generations <= 200, "they run")
        waiting = sum(server_side(live))
        # What uvicorn may buffer for each, and one event on top.
        assert waiting <= 50 * (65_536 + 65_536)
        began = time.monotonic()
        assert live.complete("a", max_tokens=3)["choices"][0]["text"] == "bcd"
        assert live.http.get("/health").status_code == 200
        assert time.monotonic() - began < 5.0
        for connection in connections:
            connection.close()
        eventually(lambda: len(live.service.running) == 0, "nothing is left")


def server_side(live: LiveServer) -> list[int]:
    """Bytes that wait in the server's own buffer of each connection."""

    def sizes() -> list[int]:
        return [each.transport.get_write_buffer_size() for each in live.server.server_state.connections]

    return live.call(sizes)


def test_connections_beyond_the_limit(tmp_path: Path, dial: Dial) -> None:
    with LiveServer(tmp_path, limits=HttpLimits(connections=8)) as live:
        live.call(live.core.gate.clear)
        busy = [never_reading(live, dial, {"prompt": "a", "max_tokens": 2}) for _ in range(6)]
        eventually(lambda: len(live.core.live) == 6, "six are busy")
        idle = [dial(live.url) for _ in range(20)]
        # A newcomer takes the place of the connection that has been idle for longest.
        assert read_all(idle[0]) == b""
        asking = dial(live.url)
        asking.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert asking.recv(4096).startswith(b"HTTP/1.1 200 ")
        busy += [never_reading(live, dial, {"prompt": "a", "max_tokens": 2}) for _ in range(2)]
        eventually(lambda: len(live.core.live) == 8, "eight are busy")
        answer = read_all(dial(live.url))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert strict(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "no_room"
        live.call(live.core.gate.set)
        for connection in busy:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        for connection in (*busy, *idle, asking):
            connection.close()


def test_a_server_that_stood_still_blames_no_one(live: LiveServer, dial: Dial) -> None:
    connection = dial(live.url)
    connection.sendall(b"GET /live HTTP/1.1\r\n")
    live.call(lambda: time.sleep(4.0))
    connection.sendall(b"host: x\r\n\r\n")
    assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_accepted_connections_notice_a_peer_that_vanished(live: LiveServer, dial: Dial) -> None:
    connection = dial(live.url)
    connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert connection.recv(4096)

    def options() -> tuple[int, ...]:
        (own,) = (
            each
            for each in live.server.server_state.connections
            if each.transport.get_extra_info("peername") == connection.getsockname()
        )
        accepted = own.transport.get_extra_info("socket")
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        return (
            accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            *(accepted.getsockopt(socket.IPPROTO_TCP, name) for name in names),
        )

    assert live.call(options) == (1, 30, 10, 3, 60_000)


def test_cuts_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    noted: list[str] = []
    counted = Cuts(noted.append)
    for _ in range(5):
        counted.add("slow_head")
    counted.add("idle")
    counted.report()
    counted.report()
    (record,) = caplog.records
    assert record.getMessage() == "http: ended connections that passed a limit: 5 slow_head"
    assert noted == ["slow_head"] * 5 + ["idle"]
