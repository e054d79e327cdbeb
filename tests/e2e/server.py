"""A real server: `tercet serve` with all its processes, on a port of the system's choice."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 120.0
END_DEADLINE_S = 30.0
ADDRESS = re.compile(r"http://(?P<host>127\.0\.0\.1|\[::1\]|localhost):(?P<port>\d+)")


def wait_for(what: str, state: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Poll until `state` holds.

    Raises:
        AssertionError: it did not within the deadline.
    """
    deadline = time.monotonic() + deadline_s
    while not state():
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.02)


class Server:
    """A running `tercet serve`; its files are in a folder of its own that is checked and removed at the end.

    Args:
        model: the model folder.
        flags: of `tercet serve`; `--port 0` comes first.
        environment: more variables.

    Attributes:
        process: the frontend.
        home: folder that holds the runtime directory and the log.
        socket: for Python clients.
    """

    def __init__(self, model: Path | str, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        # Short: a unix socket's path has a limit of 107 bytes.
        self.home = Path(tempfile.mkdtemp(prefix="tercet-e2e-"))
        self.runtime = self.home / "run"
        self.runtime.mkdir(mode=0o700)
        self.socket = self.home / "client.sock"
        self._log = (self.home / "log").open("w+", encoding="utf-8")
        variables = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime), "OMP_NUM_THREADS": "1", **(environment or {})}
        command = [sys.executable, "-m", "frontend", "serve", str(model), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--client-socket", str(self.socket), *flags],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def log(self) -> str:
        """All the server wrote so far."""
        return (self.home / "log").read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        """Address of the server, once it is printed."""
        found: list[re.Match[str]] = []

        def printed() -> bool:
            assert self.process.poll() is None, self.log()
            found[:] = ADDRESS.finditer(self.log())
            return bool(found)

        wait_for("the server's address in its log", printed, START_DEADLINE_S)
        return found[0].group(0)

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> Server:
        """Wait until it takes requests."""
        url = self.url

        def ready() -> bool:
            assert self.process.poll() is None, self.log()
            try:
                return httpx.get(f"{url}/ready", timeout=5, verify=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_for("ready server", ready, deadline_s)
        return self

    def wait_end(self, deadline_s: float = END_DEADLINE_S) -> int:
        """Wait for the end of the process; gives its exit status."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end within {deadline_s:g} s\n{self.log()}") from error

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        """POST a JSON body."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, verify=False, **options)

    def children(self) -> list[psutil.Process]:
        """Processes below the frontend, nearest first."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def tree(self) -> tuple[psutil.Process, psutil.Process, psutil.Process]:
        """Frontend, engine core, executor: each the child of the one before."""
        frontend = psutil.Process(self.process.pid)
        (core,) = frontend.children()
        (executor,) = core.children()
        return frontend, core, executor

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the frontend."""
        self.process.send_signal(number)

    def leftovers(self) -> list[str]:
        """Files of the server that are still there."""
        return [str(path) for path in [*self.runtime.rglob("*"), self.socket] if path.exists()]

    def stop(self) -> None:
        """End it, whatever state it is in, and remove its files."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(END_DEADLINE_S)
        self._log.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            sys.stderr.write(self.log())
        self.stop()
