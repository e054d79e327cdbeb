"""A server of real processes that faults are done to: frontend, engine core, and an executor, fake unless said."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from frontend.client import Client
from tests.fakes.core_process import ROOT
from tests.fakes.executor import SCRIPT_VARIABLE
from tests.fakes.waiting import gone, until

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
START_S = 60.0
FAKE = ("-m", "tests.fault.serve")
REAL = ("-m", "frontend", "serve")


class Rig:
    """A running server; a context manager, after which no process and no file of it is left.

    Args:
        model: the model folder.
        scripts: one for each fake executor that starts; the last one also for all later ones.
        flags: of the server.
        command: how Python starts it.

    Attributes:
        process: the frontend.
        socket: for Python clients.
    """

    def __init__(
        self, model: Path, scripts: Sequence[str] = ("",), flags: Sequence[str] = (), command: Sequence[str] = FAKE
    ) -> None:
        # Short: a unix socket's path has a limit.
        self.home = Path(tempfile.mkdtemp(prefix="fault-"))
        self.runtime = self.home / "run"
        self.runtime.mkdir(mode=0o700)
        self.socket = self.home / "c.sock"
        self._script = self.home / "script"
        self.next_scripts(*scripts)
        self._model, self._flags, self._command = model, flags, command
        self._log = (self.home / "log").open("a", encoding="utf-8")
        self._clients: list[Client] = []
        self.process = self._start("0")

    def _start(self, port: str) -> subprocess.Popen[bytes]:
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "OMP_NUM_THREADS": "1",
            SCRIPT_VARIABLE: f"@{self._script}",
        }
        flags = ["--port", port, "--client-socket", str(self.socket), "--debug-endpoints", *self._flags]
        self._read_from = self._log.tell()
        return subprocess.Popen(
            [sys.executable, *self._command, str(self._model), *flags],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def next_scripts(self, *scripts: str) -> None:
        """What the executors that start from now on do."""
        self._script.write_text("\n".join(scripts), encoding="utf-8")

    def restart(self) -> None:
        """A new server on the same port and paths, at once after the end of the one before."""
        port = self.url.rpartition(":")[2]
        self.process = self._start(port)

    def log(self) -> str:
        """What the latest server wrote."""
        return (self.home / "log").read_bytes()[self._read_from :].decode()

    @property
    def url(self) -> str:
        """Its address."""
        until(f"an address: {self.log()}", lambda: ADDRESS.search(self.log()) is not None, START_S)
        found = ADDRESS.search(self.log())
        assert found is not None
        return found[0]

    def get(self, path: str) -> httpx.Response:
        """GET a path."""
        with httpx.Client(trust_env=False, verify=False, timeout=20) as client:
            return client.get(f"{self.url}{path}")

    def health(self) -> tuple[int, str]:
        """Status code and state."""
        answer = self.get("/health")
        return answer.status_code, answer.json()["status"]

    def wait_ready(self) -> Rig:
        """Wait until it takes requests."""
        until(f"it is ready: {self.url}", lambda: self._is_ready(), START_S)
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            return self.health()[0] == 200
        except httpx.TransportError:
            return False

    def client(self) -> Client:
        """A Python client, connected to the core."""
        until("the core listens", self.socket.exists, START_S)
        client = Client(self.socket, deadline_s=20.0)
        self._clients.append(client)
        return client

    def pids(self) -> tuple[int, int, int]:
        """Frontend, core, executor; 0 for one that is not there."""
        core = _child(self.process.pid)
        return self.process.pid, core, _child(core)

    def pid(self, place: int) -> int:
        """Of frontend (0), core (1) or executor (2); waits until it is there."""
        until(f"process {place}", lambda: self.pids()[place] != 0, START_S)
        return self.pids()[place]

    def invariants(self) -> dict[str, Any]:
        """The ledger of KV blocks."""
        answer: dict[str, Any] = self.get("/debug/invariants").json()
        return answer

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait_end(self, seconds: float = 30.0) -> int:
        """The exit status of the frontend."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end within {seconds:g} s\n{self.log()}") from error

    def leftovers(self) -> list[str]:
        """Files of the server that are still there."""
        return [str(path) for path in [*self.runtime.rglob("*"), self.socket] if path.exists()]

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if error is not None:
            sys.stderr.write(self.log())
        for client in self._clients:
            client.close()
        self.close()

    def close(self) -> None:
        """End what is left of it."""
        pids = [pid for pid in self.pids() if pid]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for pid in pids:
            until(f"process {pid} is gone", lambda pid=pid: gone(pid), 10.0)  # type: ignore[misc]
        self._log.close()
        shutil.rmtree(self.home, ignore_errors=True)


def _child(pid: int) -> int:
    try:
        children = psutil.Process(pid).children() if pid else []
        living = [int(child.pid) for child in children if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return 0
    return living[-1] if living else 0


def raw_request(url: str, content: bytes, seconds: float = 5.0) -> bytes:
    """Send bytes to an HTTP port; what comes back until it closes, or stays silent for a second."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(content)
        connection.settimeout(1.0)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except (TimeoutError, ConnectionResetError):
            pass
        return answer
