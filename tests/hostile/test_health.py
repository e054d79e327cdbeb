"""While a prompt of 5 MB is tokenized and 32 streams run, /health answers at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import httpx
import pytest

from tests.fakes.core_process import ROOT
from tests.fakes.waiting import until
from tests.hostile.process import Served

LIMIT_S = 0.5
STREAMS = 32
MEGABYTES = 5 * 10**6
WORDS = "the quick brown fox jumps over 13 lazy dogs, naïve café 漢字. "


@pytest.fixture(scope="module")
def served(chain_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with room for all streams, and a tokenizer that has to read a text to tell that it is too long."""
    chain_folder = shutil.copytree(chain_folder, tmp_path_factory.mktemp("unbounded") / "chain")
    path = chain_folder / "tokenizer.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["added_tokens"][0]["lstrip"] = True
    path.write_text(json.dumps(fields), encoding="utf-8")
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


class Probe:
    """Asks for /health from another process; a context manager.

    Attributes:
        took: seconds of each answer, once it has been left.
    """

    def __init__(self, url: str) -> None:
        self.took: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.probe", url], cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True
        )

    def __enter__(self) -> Probe:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "begun\n"
        return self

    def __exit__(self, *_: object) -> None:
        answer, _errors = self._process.communicate(timeout=30)
        assert self._process.returncode == 0
        self.took = json.loads(answer)


@pytest.mark.parametrize("path", [pytest.param("/v1/completions", marks=pytest.mark.slow), "/v1/chat/completions"])
def test_health_is_quick_while_a_huge_prompt_is_read(served: Served, path: str) -> None:
    with Streams(served.url) as streams, Probe(served.url) as probe:
        lines = streams.lines
        with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as http:
            status = http.post(path, json=huge(path)).status_code
        assert streams.lines > lines
    # It is longer than the model's context, which only the tokenizer could tell.
    assert status == 400
    assert len(probe.took) > 20
    assert max(probe.took) < LIMIT_S, sorted(probe.took)[-5:]
