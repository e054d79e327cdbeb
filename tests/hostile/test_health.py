"""While a prompt of 5 MB is tokenized and 32 streams run, /health answers at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.waiting import until
from tests.hostile.process import Served

LIMIT_S = 0.5
# A single one may wait for the test's own threads, where there are two cores for all of them.
WORST_S = 2.0
STREAMS = 32
MEGABYTES = 5 * 10**6
WORDS = "the quick brown fox jumps over 13 lazy dogs, naïve café 漢字. "


@pytest.fixture(scope="module")
def served(chain_folder: Path) -> Iterator[Served]:
    """A server with room for all streams."""
    flags = ("--max-num-seqs", "64", "--num-kv-blocks", "4096")
    with Served(chain_folder, *flags, script="delay_s=0.02,blocks=4096") as server:
        yield server


class Streams:
    """Streams that run until told to end; a context manager."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._end = threading.Event()
        self.lines = 0
        self._threads = [threading.Thread(target=self._one, args=(number,)) for number in range(STREAMS)]

    def _one(self, number: int) -> None:
        body = {"prompt": [number + 1], "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as http:
            while not self._end.is_set():
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        self.lines += 1
                        if self._end.is_set():
                            break

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        until("all streams run", lambda: self.lines > STREAMS * 4, 30.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(30)


def huge(path: str) -> dict[str, Any]:
    text = (WORDS * (MEGABYTES // len(WORDS.encode()) + 1))[:MEGABYTES]
    if path.endswith("chat/completions"):
        return {"messages": [{"role": "user", "content": text}]}
    return {"prompt": text}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_health_is_quick_while_a_huge_prompt_is_read(served: Served, path: str) -> None:
    statuses: list[int] = []
    took: list[float] = []

    def ask() -> None:
        with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as http:
            statuses.append(http.post(path, json=huge(path)).status_code)

    with Streams(served.url) as streams, httpx.Client(base_url=served.url, timeout=20, trust_env=False) as http:
        asking = threading.Thread(target=ask)
        asking.start()
        lines = streams.lines
        while asking.is_alive() or len(took) < 20:
            began = time.monotonic()
            assert http.get("/health").status_code == 200
            took.append(time.monotonic() - began)
            time.sleep(0.01)
        asking.join()
        assert streams.lines > lines
    # It is longer than the model's context, which only the tokenizer could tell.
    assert statuses == [400]
    took.sort()
    assert took[len(took) * 99 // 100] < LIMIT_S, took[-5:]
    assert took[-1] < WORST_S, took[-5:]
