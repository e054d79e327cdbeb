"""Thousands of connections under small limits of descriptors: no spin, no wrong answer, and all given back."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.waiting import until
from tests.hostile.process import Served, canary, measured
from tests.hostile.raw import connect, read_all, request

STREAMS = 64
TOKENS = 60
SCRIPT = "delay_s=0.01"
LIMITS = ("--max-num-seqs", "64", "--num-kv-blocks", "1024")


@pytest.fixture
def descriptors_for_us() -> Iterator[None]:
    """The test itself needs as many as the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 8192 else max(soft, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Stream(threading.Thread):
    """One stream, read to its end."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(name=f"stream {number}")
        self.text = ""
        body = {"prompt": [number + 1], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
        self._connection = connect(url)
        self._body = body

    def run(self) -> None:
        """Ask and read."""
        self._connection.settimeout(60)
        self._connection.sendall(request(self._body))
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = self._connection.recv(65536)
            if not part:
                break
            received += part
        self._connection.close()
        events = [line.removeprefix("data: ") for line in received.decode().splitlines() if line.startswith("data: ")]
        if events and events[-1] == "[DONE]":
            self.text = "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1])


def streamed(url: str, count: int) -> list[str]:
    """The texts of that many streams at once."""
    streams = [Stream(url, number) for number in range(count)]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join(90)
    return [stream.text for stream in streams]


def dial_many(url: str, count: int) -> list[socket.socket]:
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            made.append(connect(url))  # noqa: PERF401 - those that were made must be closed
    except OSError:
        close_all(made)
        raise
    return made


def close_all(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


@pytest.mark.usefixtures("descriptors_for_us")
def test_two_thousand_idle_connections_and_64_streams(chain_folder: Path) -> None:
    with Served(chain_folder, *LIMITS, script=SCRIPT, descriptors=(1024, 8192)) as server:
        top = psutil.Process(server.process.pid)
        said, pids = canary(server.http), server.pids()
        before = top.num_fds()
        alone = streamed(server.url, STREAMS)
        assert all(alone)
        idle = dial_many(server.url, 2000)
        try:
            until("all are accepted", lambda: top.num_fds() > before + 1990, 20.0)
            assert streamed(server.url, STREAMS) == alone
            assert server.http.get("/health").status_code == 200
        finally:
            close_all(idle)
        until("descriptors are back", lambda: abs(top.num_fds() - before) <= 10, 20.0)
        assert (server.pids(), canary(server.http)) == (pids, said)


@pytest.mark.usefixtures("descriptors_for_us")
def test_more_connections_than_descriptors(chain_folder: Path) -> None:
    with Served(chain_folder, *LIMITS, script=SCRIPT, descriptors=(256, 256)) as server:
        top = psutil.Process(server.process.pid)
        before, pids, said = top.num_fds(), server.pids(), canary(server.http)
        alone = streamed(server.url, 32)
        running = [Stream(server.url, number) for number in range(32)]
        for stream in running:
            stream.start()
        idle = dial_many(server.url, 600)
        try:
            for stream in running:
                stream.join(90)
            assert [stream.text for stream in running] == alone
            # No spin: what waits or was refused costs no time.
            busy = server.busy_s()
            seconds = measured(2.0)
            assert (server.busy_s() - busy) / seconds < 0.5
            # A newcomer is served, in place of the one that has been idle for longest.
            assert server.http.get("/health").status_code == 200
            assert read_all(idle[0]) == b""
            assert top.num_fds() <= 256
        finally:
            close_all(idle)
        until("descriptors are back", lambda: abs(top.num_fds() - before) <= 10, 20.0)
        assert (server.pids(), canary(server.http)) == (pids, said)
