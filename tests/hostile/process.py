"""A server of three real processes with the fake executor, for what can only be seen from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from tests.fakes.core_process import ROOT
from tests.fakes.executor import SCRIPT_VARIABLE
from tests.fakes.waiting import until

MODULE = "tests.fault.serve"
NAME = "model"


class Served:
    """A running server; a context manager.

    Args:
        model: folder.
        flags: of `tercet serve`.
        script: of the fake executor.
        environment: more variables.
        descriptors: soft and hard limit of open files.
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        script: str = "",
        environment: Mapping[str, str] | None = None,
        descriptors: tuple[int, int] | None = None,
        command: Sequence[str] = ("-m", MODULE),
    ) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="host-"))
        self._out = (self.home / "log").open("w", encoding="utf-8")
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(self.home)}
        variables |= {SCRIPT_VARIABLE: script, "OMP_NUM_THREADS": "1", **(environment or {})}
        limit = "" if descriptors is None else f"ulimit -Sn {descriptors[0]} && ulimit -Hn {descriptors[1]} && "
        told = [sys.executable, *command, str(model), "--port", "0", "--served-model-name", NAME, *flags]
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", f'{limit}exec "$@"', "serve", *told],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.url = ""

    def log(self) -> str:
        """All that was written."""
        return (self.home / "log").read_text(encoding="utf-8")

    def __enter__(self) -> Served:
        try:
            until("an address", self._has_address, 60.0)
            self.url = self.log().split("listening on ")[1].split()[0]
            self.http = httpx.Client(base_url=self.url, timeout=20, trust_env=False, verify=False)
            until("ready", lambda: self.http.get("/ready").status_code == 200, 60.0)
        except (AssertionError, httpx.TransportError):
            sys.stderr.write(self.log())
            self._end()
            raise
        return self

    def _has_address(self) -> bool:
        assert self.process.poll() is None, "the server ended"
        return "listening on http://" in self.log()

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if error is not None:
            sys.stderr.write(self.log())
        self.http.close()
        self._end()

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self._out.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def tree(self) -> list[psutil.Process]:
        """Frontend, core, executor."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def pids(self) -> list[int]:
        """Of all three."""
        return [each.pid for each in self.tree()]

    def memory(self) -> list[int]:
        """Bytes that each process holds for itself, swapped ones too."""
        return [own_memory(each.pid) for each in self.tree()]

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples that hold a label."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith((name + "{", name + " ")) and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def busy_s(self) -> float:
        """Processor seconds of the frontend so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until the gauges say that nothing runs."""
        gauges = ("tercet_num_requests_running", "tercet_num_requests_waiting", "tercet_kv_cache_usage_perc")
        until("nothing runs", lambda: all(self.metric(name) == 0 for name in gauges), seconds)


def own_memory(pid: int) -> int:
    """RssAnon and VmSwap of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def canary(http: httpx.Client) -> str:
    """The text of a fixed request, which must never change."""
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def measured(seconds: float) -> float:
    """Let time pass, and give how much did."""
    began = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - began
