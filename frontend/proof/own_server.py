"""A real server for the time of a proof: `tercet serve` with all its processes."""

from __future__ import annotations

import http.client
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

from engine_core.wire.child import Child
from frontend.errors import EngineFailed, StartError, StartRefused, UsageError

ADDRESS: Final = re.compile(r"^listening on (http://\S+)$", re.MULTILINE)
BOUND_SERVER: Final = "frontend.proof.bound_server"
START_S: Final = 1800.0
END_S: Final = 60.0
POLL_S: Final = 0.05
LOG_LINES: Final = 12
ERROR: Final = "error: "
# By the exit status of a server.
KINDS: Final[Mapping[int, type[StartError]]] = {kind.exit_code: kind for kind in (UsageError, StartRefused)}


class OwnServer:
    """A server that ends with this object, or with this process.

    Args:
        model: the model folder.
        flags: of `tercet serve`, beside port and sockets.
        program: module that serves with these flags, and dies with its parent.

    Attributes:
        socket: for Python clients.
        command: as a user would type it, apart from port and socket.
    """

    def __init__(self, model: Path, flags: Sequence[str], program: str = BOUND_SERVER) -> None:
        # Short: the path of a unix socket has a limit of 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="tercet-"))
        self.socket = self._folder / "client.sock"
        self._log = self._folder / "log"
        self.command = ["tercet", "serve", str(model), *flags]
        words = ["serve", str(model), "--port", "0", "--client-socket", str(self.socket), *flags]
        self._child = Child.spawn("server", ["-m", program, str(self._log), *words])
        self._status: int | None = None

    @property
    def log(self) -> str:
        """All it wrote so far."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    @property
    def url(self) -> str:
        """Its address.

        Raises:
            StartError: it ended before it had one.
        """
        self._wait("the server's address", lambda: ADDRESS.search(self.log) is not None)
        found = ADDRESS.search(self.log)
        assert found is not None
        return found[1]

    def wait_ready(self) -> None:
        """Wait until it takes requests.

        Raises:
            StartRefused, UsageError: it refused to start; EngineFailed: it ended otherwise, or START_S passed.
        """
        where = urlsplit(self.url)
        assert where.hostname is not None
        host, port = where.hostname, where.port

        def ready() -> bool:
            connection = http.client.HTTPConnection(host, port, timeout=10)
            try:
                connection.request("GET", "/ready")
                return connection.getresponse().status == http.client.OK
            except OSError:
                return False
            finally:
                connection.close()

        self._wait("a ready server", ready)

    def stop(self) -> int:
        """End it, and give its exit status; a second call gives the same."""
        if self._status is None:
            self._status = self._child.end(END_S)
        return self._status

    def _wait(self, what: str, state: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not state():
            if (status := self._child.status()) is not None:
                raise self._ended(what, status)
            if time.monotonic() > deadline:
                raise EngineFailed(f"{what}: took over {START_S:g} s: {self._last_lines()}")
            time.sleep(POLL_S)

    def _ended(self, what: str, status: int) -> StartError:
        """What a server says that ends by itself: its last line tells why."""
        kind = KINDS.get(status, EngineFailed)
        reason = next((line for line in reversed(self.log.splitlines()) if line.startswith(ERROR)), None)
        if reason is None:
            return kind(f"{what}: the server ended with status {status}: {self._last_lines()}")
        return kind(f"tercet serve: {reason.removeprefix(ERROR)}")

    def _last_lines(self) -> str:
        return " | ".join(self.log.splitlines()[-LOG_LINES:])

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
