"""What a request may cost in memory: the peaks of all processes, while requests ask for as much as they can."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.waiting import until
from tests.hostile.process import Served, canary
from tests.hostile.raw import connect, read_all

BODY_LIMIT = 2_000_000
CAPS_LIMIT = 50 * 10**6
HEADS_LIMIT = 20 * 10**6
BODIES = 20
# What a body costs while it waits, as --help says: itself, its text, and some of both while one is decoded.
COPIES = 3
HUGE = 10**9


@pytest.fixture(scope="module")
def served(chain_folder: Path) -> Iterator[Served]:
    """A server that has answered, so that all it needs for that is there."""
    with Served(chain_folder, "--max-body-bytes", str(BODY_LIMIT)) as server:
        canary(server.http)
        yield server


class Peak:
    """How far the memory of all processes together rises above what it is now.

    Args:
        server: whose.
    """

    def __init__(self, server: Served) -> None:
        self._pids = server.pids()
        for pid in self._pids:
            # Resets the peak that the kernel keeps.
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = self._sum("VmRSS")

    def _sum(self, field: str) -> int:
        total = 0
        for pid in self._pids:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
        return total

    @property
    def rise(self) -> int:
        """Bytes, at the highest so far."""
        return self._sum("VmHWM") - self._before


CAPS: list[dict[str, Any]] = [
    *({"logprobs": value} for value in (10**6, -1)),
    *({"prompt_logprobs": value} for value in (-1, HUGE)),
    *({"n": value} for value in (0, -1, HUGE)),
    {"best_of": HUGE},
    {"stop": [f"stop {number}" for number in range(100_000)]},
    {"prompt": ["a"] * 100_000},
    {"prompt": [[1]] * 100_000},
    {"prompt": [1] * 500_000},
    {"stop_token_ids": list(range(100_000))},
    {"prompt": ["a"] * 1000, "n": 128},
]
CHAT_CAPS: list[dict[str, Any]] = [
    *({"logprobs": True, "top_logprobs": value} for value in (21, HUGE, -1)),
    {"n": HUGE},
    {"messages": [{"role": "user", "content": "a"}] * 20_000},
]


def test_caps_hold_memory_too(served: Served) -> None:
    pids, text, peak = served.pids(), canary(served.http), Peak(served)
    for body in CAPS:
        answer = served.http.post("/v1/completions", json={"prompt": "a", **body})
        assert answer.status_code == 400, (str(body)[:80], answer.text[:200])
    for body in CHAT_CAPS:
        answer = served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **body})
        assert answer.status_code == 400, (str(body)[:80], answer.text[:200])
    assert peak.rise < CAPS_LIMIT
    assert (served.pids(), canary(served.http)) == (pids, text)


@pytest.mark.parametrize(
    "lines",
    [
        [b"x-request-id: " + b"a" * 10**6 + b"\r\n"],
        [b"x-%d: y\r\n" % number for number in range(5000)],
        [b"x-long: ", *([b"a" * 65_536] * 1000)],
    ],
    ids=["id", "many", "endless"],
)
def test_heads_without_measure_cost_nothing(served: Served, lines: list[bytes]) -> None:
    peak, connection = Peak(served), connect(served.url)
    try:
        for line in (b"GET /live HTTP/1.1\r\nhost: x\r\n", *lines, b"\r\n\r\n"):
            connection.sendall(line)
        answer = read_all(connection)
    except (BrokenPipeError, ConnectionResetError):
        # Refused and closed before all was sent.
        answer = b""
    assert answer[:13] in (b"HTTP/1.1 431 ", b"")
    connection.close()
    assert peak.rise < HEADS_LIMIT
    assert served.http.get("/live").status_code == 200


def head(length: int) -> bytes:
    """Of a request with a body of so many bytes."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % length
    )


@pytest.mark.parametrize("length", [BODY_LIMIT + 1, 500_000_000])
def test_a_body_beyond_the_limit_is_refused_before_it_is_read(served: Served, length: int) -> None:
    peak = Peak(served)
    connection = connect(served.url)
    connection.sendall(head(length))
    # Not a byte of it was sent.
    assert read_all(connection).startswith(b"HTTP/1.1 413 ")
    connection.close()
    assert peak.rise < 5 * 10**6


def test_many_large_bodies_at_once_cost_a_multiple_of_their_size(served: Served) -> None:
    text, body = canary(served.http), json.dumps({"prompt": "x" * (BODY_LIMIT * 9 // 10)}).encode()
    peak = Peak(served)
    connections: list[socket.socket] = []
    for _ in range(BODIES):
        connections.append(connect(served.url))
        connections[-1].sendall(head(len(body)) + body[:-1])
    until("all but the last bytes have come", lambda: peak.rise > BODIES * len(body) * 8 // 10, 10.0)
    for connection in connections:
        connection.sendall(body[-1:])
    for connection in connections:
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
        connection.close()
    assert peak.rise < COPIES * BODIES * BODY_LIMIT, peak.rise / (BODIES * BODY_LIMIT)
    assert canary(served.http) == text
