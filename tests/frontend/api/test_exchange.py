"""Clients that leave, bodies that are too large, answers that are cut."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from frontend.config import HttpOptions
from frontend.errors import ServerStopping
from tests.fakes.live import LiveServer, eventually, strict

LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}


def send_raw(live: LiveServer, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent."""
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def hang_up(connection: socket.socket, how: str) -> None:
    if how == "rst":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that takes 5 ms a token."""
    with LiveServer(tmp_path_factory.mktemp("slow")) as live:
        live.core.step_s = 0.005
        yield live


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("phase", ["waiting", "running"])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}])
def test_a_client_that_leaves_frees_everything(slow: LiveServer, how: str, phase: str, fields: dict[str, Any]) -> None:
    aborted = slow.metric("tercet_request_success_total", finished_reason="abort")
    if phase == "waiting":
        slow.call(slow.core.gate.clear)
    connection = send_raw(slow, {**LONG, **fields})
    eventually(lambda: len(slow.core.live) == fields.get("n", 1), "the core has the request")
    if phase == "running":
        eventually(lambda: all(live.count > 2 for live in slow.core.live.values()), "tokens flow")
    hang_up(connection, how)
    eventually(lambda: not slow.core.live, "the core was told", 2.0)
    slow.call(slow.core.gate.set)
    eventually(
        lambda: slow.metric("tercet_request_success_total", finished_reason="abort") == aborted + 1, "it is counted"
    )
    eventually(lambda: len(slow.service.running) == 0, "nothing runs")
    assert slow.client.open_generations == 0


def test_a_client_that_leaves_in_its_body(slow: LiveServer) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt"')
    connection.close()
    assert slow.complete("a", max_tokens=1)["choices"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_cut_answer_says_so(slow: LiveServer, stream: bool) -> None:
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(slow.post("/v1/completions", {**LONG, "stream": stream})), name="asking"
    )
    asking.start()
    eventually(lambda: any(live.count > 2 for live in slow.core.live.values()), "tokens flow")
    assert slow.call(lambda: slow.service.running.cut(ServerStopping())) == 1
    asking.join(10)
    text = answers[0].text
    if stream:
        last = [block for block in text.split("\n\n") if block][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    else:
        assert answers[0].status_code == 503
        assert strict(answers[0].content)["error"]["code"] == "shutting_down"
    eventually(lambda: not slow.core.live, "the core was told")


def test_bodies_over_the_limit(tmp_path: Path) -> None:
    with LiveServer(tmp_path, options=HttpOptions(max_body_bytes=10_000)) as live:
        fits = b'{"prompt": "a", "max_tokens": 1, "user": "%b"}'
        fits = fits % (b"x" * (10_000 - len(fits) + 2))
        assert len(fits) == 10_000
        assert live.post("/v1/completions", fits).status_code == 200
        for body in (fits + b" ", b"x" * 1_000_000):
            answer = live.post("/v1/completions", body)
            assert answer.status_code == 413
            assert strict(answer.content)["error"]["code"] == "body_too_large"

        def chunks() -> Any:
            for _ in range(20):
                yield b" " * 1000

        assert live.http.post("/v1/completions", content=chunks()).status_code == 413
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500000000\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
        assert live.complete("a", max_tokens=1)["choices"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "given", ["gzip", "x-gzip", "deflate", "br", "zstd", "GZIP", "gzip, identity", "identity,br", "?"]
)
def test_an_encoded_body_is_refused_as_such(slow: LiveServer, path: str, given: str) -> None:
    body = gzip.compress(b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}')
    answer = slow.post(path, body, content_encoding=given)
    assert answer.status_code == 415
    error = strict(answer.content)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "unsupported_content_encoding"
    assert repr(given) in error["message"]


@pytest.mark.parametrize("given", ["", "identity", "Identity", "identity, identity"])
def test_a_body_as_it_is_may_say_so(slow: LiveServer, given: str) -> None:
    assert slow.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, content_encoding=given).status_code == 200


def test_an_encoded_body_is_refused_before_it_is_read(slow: LiveServer) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        # An encoding may stand in a header of its own.
        connection.sendall(head + b"content-encoding: identity\r\ncontent-encoding: gzip\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 415 ")


def test_an_answer_nobody_reads_is_cut(tmp_path: Path) -> None:
    with LiveServer(tmp_path, max_backlog_bytes=4096) as live:
        connection = send_raw(live, {**LONG, "n": 100, "logprobs": 5, "stream": True})
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        eventually(lambda: len(live.core.submits) == 100, "the core has the request")
        eventually(lambda: not live.core.live, "the core was told")
        assert live.core.aborted
        connection.close()
        eventually(lambda: len(live.service.running) == 0, "nothing runs")
