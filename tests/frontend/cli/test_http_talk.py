"""Talking to a server over HTTP; the server here is a script of bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from frontend.cli.http_talk import HttpTalk
from frontend.errors import TalkError, UsageError

USER = {"role": "user", "content": "Hi"}


def chunk(text: str | None) -> bytes:
    """One event with a piece of text."""
    delta = {} if text is None else {"content": text}
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


class Server(ThreadingHTTPServer):
    """A server whose answers a test sets.

    Attributes:
        events: of every stream; gone: set when a client left a stream early.
        status, error: of an answer that is none.
        requests: bodies; headers of the last request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events: list[bytes] = []
        self.endless = False
        self.gone = threading.Event()
        self.status = 200
        self.error: bytes = b""
        self.models: Any = {"data": [{"id": "served"}]}
        self.requests: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers as the server says."""

    server: Server

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """The list of models."""
        body = json.dumps(self.server.models).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """A stream, or an error."""
        server = self.server
        server.headers = dict(self.headers.items())
        server.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(server.status)
        self.end_headers()
        if server.status != 200:
            self.wfile.write(server.error)
            return
        try:
            for event in server.events:
                self.wfile.write(event)
            while server.endless:
                self.wfile.write(chunk("more"))
        except ConnectionError:
            server.gone.set()


@pytest.fixture
def server() -> Iterator[Server]:
    """A running server."""
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def talk_to(server: Server, **options: Any) -> HttpTalk:
    """A talk to it."""
    return HttpTalk(server.url, api_key="secret", options=options, silence_s=5.0)


def test_an_answer(server: Server) -> None:
    server.events = [b": ping\n\n", chunk(None), chunk("Hel"), chunk("lo \u4f60"), b"data: [DONE]\n\n"]
    talk = talk_to(server, max_tokens=5)
    assert list(talk.answer([USER])) == ["Hel", "lo \u4f60"]
    assert server.requests == [{"model": "served", "messages": [USER], "stream": True, "max_tokens": 5}]
    assert server.headers["authorization"] == "Bearer secret"
    assert list(talk.answer([USER])) == ["Hel", "lo \u4f60"]
    talk.close()


def test_closing_the_iterator_leaves_the_server(server: Server) -> None:
    server.endless = True
    answer = talk_to(server).answer([USER])
    assert next(answer) == "more"
    assert hasattr(answer, "close")
    answer.close()
    assert server.gone.wait(5)


def test_errors_of_the_server_are_told(server: Server) -> None:
    server.status, server.error = 400, b'{"error": {"message": "max_tokens: too large"}}'
    with pytest.raises(TalkError, match="400: max_tokens: too large"):
        next(talk_to(server).answer([USER]))
    server.status, server.error = 502, b"<html>bad gateway"
    with pytest.raises(TalkError, match="502: <html>bad gateway"):
        next(talk_to(server).answer([USER]))


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([chunk("a"), b'data: {"error": {"message": "the engine died"}}\n\n'], "the engine died"),
        ([chunk("a")], "cut off"),
        ([chunk("a"), b"data: {\n\n"], "no JSON"),
        ([chunk("a"), b"data: []\n\n"], "no JSON object"),
    ],
)
def test_streams_that_go_wrong(server: Server, events: list[bytes], says: str) -> None:
    server.events = events
    answer = talk_to(server).answer([USER])
    assert next(answer) == "a"
    with pytest.raises(TalkError, match=says):
        next(answer)


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": 5}])
def test_a_server_that_lists_no_model(server: Server, models: Any) -> None:
    server.models = models
    with pytest.raises(TalkError, match="lists no model"):
        next(talk_to(server).answer([USER]))


def test_no_server() -> None:
    talk = HttpTalk("http://127.0.0.1:1", api_key=None, options={})
    with pytest.raises(TalkError, match=r"127\.0\.0\.1:1"):
        next(talk.answer([USER]))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        HttpTalk(url, api_key=None, options={})
