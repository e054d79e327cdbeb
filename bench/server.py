"""`tercet serve` as a process for a measurement."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType

START_S = 300.0
END_S = 60.0
READY = re.compile(r"ready in .*: (http://\S+) serves")


class ServerFailed(Exception):
    """It did not start; the message ends with what it wrote."""


class BenchServer:
    """A server on a port of the system's choice, from its start to its end.

    Args:
        model: folder of the model.
        flags: of `tercet serve`.

    Attributes:
        url: of the server, once it is entered.
    """

    def __init__(self, model: Path, flags: Sequence[str]) -> None:
        self.url = ""
        self._lines: Queue[str | None] = Queue(10_000)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "frontend", "serve", str(model), "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not self.url:
                self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> BenchServer:
        seen: list[str] = []
        while not self.url:
            try:
                line = self._lines.get(timeout=START_S)
            except Empty:
                line = None
            if line is None:
                self._process.kill()
                raise ServerFailed("".join(seen[-20:]))
            seen.append(line)
            if found := READY.search(line):
                self.url = found[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
