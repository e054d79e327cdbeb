"""The life of `tercet serve` with real processes, over a fake engine core."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from frontend.errors import UsageError
from frontend.serving import check_client_socket, process_title, try_line
from tests.fakes.core import VARIABLE
from tests.fakes.live import eventually

ROOT = Path(__file__).parents[2]
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}


class Server:
    """A server process. Its runtime directories go to `base`.

    Args:
        model: folder.
        base: an empty directory, short enough for socket paths.
        knobs: of the fake core.
        flags: further ones.
    """

    def __init__(
        self, model: Path, base: Path, knobs: Mapping[str, Any] | None = None, flags: Sequence[str] = ()
    ) -> None:
        self.base = base
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(base), VARIABLE: json.dumps(knobs or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.serve", str(model), "--port", "0", *flags],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=_read, args=(self.process.stdout, self.lines)),
            threading.Thread(target=_read, args=(self.process.stderr, self.errors)),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def url(self) -> str:
        """Where it listens; waits until it says so."""
        eventually(lambda: any(line.startswith("listening on ") for line in self.lines), f"{self.lines} {self.errors}")
        return next(line for line in self.lines if line.startswith("listening on ")).split()[2]

    def ready(self) -> httpx.Client:
        """A client, once requests are taken."""
        with httpx.Client(base_url=self.url, timeout=10, trust_env=False) as probe:
            eventually(lambda: probe.get("/ready").status_code == 200, f"ready: {self.lines} {self.errors}")
        return httpx.Client(base_url=self.url, timeout=10, trust_env=False)

    def core(self) -> psutil.Process:
        """The engine core's process."""
        eventually(lambda: bool(psutil.Process(self.process.pid).children()), "a child")
        return psutil.Process(self.process.pid).children()[0]

    def wait(self, seconds: float = 15.0) -> int:
        """Its exit code."""
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(5)
        return code

    def leftovers(self) -> list[Path]:
        """Files it left behind."""
        return list(self.base.iterdir())

    def close(self) -> None:
        """End it, however it stands."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _read(stream: Any, lines: list[str]) -> None:
    lines.extend(line.rstrip("\n") for line in stream)


@pytest.fixture
def servers(chain_folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes servers, and ends them."""
    made: list[Server] = []

    def make(knobs: Mapping[str, Any] | None = None, flags: Sequence[str] = (), model: Path = chain_folder) -> Server:
        server = Server(model, tmp_path, knobs, flags)
        made.append(server)
        return server

    yield make
    for server in made:
        server.close()


def test_a_start_and_an_orderly_end(servers: Any) -> None:
    server = servers({"load_s": 0.5}, ["--served-model-name", "chain", "--api-key", "sk-secret"])
    key = {"authorization": "Bearer sk-secret"}
    with httpx.Client(base_url=server.url, timeout=10, trust_env=False) as loading:
        assert loading.get("/live").status_code == 200
        health = loading.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        refused = loading.post("/v1/completions", json={"prompt": "a"}, headers=key)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
    with server.ready() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "model": "chain"}, headers=key)
        assert answer.json()["choices"][0]["text"] == "bcd"
    core = server.core()
    frontend = psutil.Process(server.process.pid)
    title = " ".join(frontend.cmdline())
    assert title.startswith("tercet ")
    assert "sk-secret" not in title + " ".join(core.cmdline())
    (runtime,) = server.leftovers()
    assert runtime.stat().st_mode & 0o777 == 0o700
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert server.leftovers() == []
    assert not core.is_running()
    text = "\n".join(server.lines)
    for words in ("loading weights: ", "ready in ", server.url, "Python clients: ", "curl -N "):
        assert words in text
    assert "sk-secret" not in text + "\n".join(server.errors)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading(servers: Any, number: signal.Signals) -> None:
    server = servers({"load_s": 60})
    core = server.core()
    started = time.monotonic()
    server.process.send_signal(number)
    assert server.wait() == 0
    assert time.monotonic() - started < 5
    assert not core.is_running()
    assert server.leftovers() == []


def test_an_occupied_port(servers: Any, chain_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = servers(flags=["--port", str(port)])
        assert server.wait(5) == 2
        assert any(f"127.0.0.1:{port}" in line for line in server.errors)
        assert server.leftovers() == []


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_broken_folder_is_refused_at_once(servers: Any, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("broken") / "empty"
    folder.mkdir()
    server = servers(model=folder.parent / name)
    assert server.wait(5) == 3
    assert any(str(folder.parent / name) in line for line in server.errors)
    assert not any("Traceback" in line for line in server.errors)
    assert server.leftovers() == []


def test_a_refusal_of_the_core(servers: Any) -> None:
    server = servers({"refuse": "config.json: rope_scaling.type: what is 'spiral'?"})
    assert server.wait() == 3
    assert any("what is 'spiral'?" in line for line in server.errors)
    assert server.leftovers() == []


def test_the_core_dies_and_none_may_follow(servers: Any) -> None:
    server = servers({"step_s": 0.01}, ["--max-restarts", "0"])
    with server.ready() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        core = server.core()
        core.kill()
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert "data: [DONE]" not in rest
    assert server.wait() == 4
    said = [line for line in server.errors if line.startswith("error: ")]
    assert len(said) == 1
    assert "signal 9" in said[0]
    assert server.leftovers() == []


def test_running_answers_finish_before_the_end(servers: Any) -> None:
    server = servers({"step_s": 0.005})
    with server.ready() as client, client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 200}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        server.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=server.url, timeout=10, trust_env=False) as other:
            eventually(lambda: other.get("/health").status_code == 503, "it drains")
            assert other.get("/ready").json()["status"] == "draining"
            assert other.get("/live").status_code == 200
            assert other.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert server.wait() == 0


@pytest.mark.parametrize("flags", [["--shutdown-timeout", "0.3"], []])
def test_answers_are_cut_when_time_is_up_or_at_a_second_signal(servers: Any, flags: list[str]) -> None:
    server = servers({"step_s": 0.05}, flags)
    with server.ready() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        if not flags:
            eventually(lambda: any("stopping: 1 answers have" in line for line in server.lines), "it drains")
            server.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert server.wait() == 0
    assert time.monotonic() - started < 5
    assert server.leftovers() == []


def test_killed_servers_leave_nothing_for_long(servers: Any, chain_folder: Path) -> None:
    first = servers()
    with first.ready():
        core = first.core()
    first.process.kill()
    assert first.wait() == -signal.SIGKILL
    eventually(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE, "the core follows", 5)
    (left,) = first.leftovers()
    second = servers(flags=["--port", first.url.rpartition(":")[2]])
    with second.ready():
        assert not left.exists()
        assert len(second.leftovers()) == 1


def test_a_client_socket_at_a_given_path(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "core.sock"
    server = servers(flags=["--client-socket", str(path)])
    with server.ready():
        assert path.is_socket()
        with pytest.raises(UsageError, match="another server listens there"):
            check_client_socket(str(path))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not path.exists()


def test_socket_paths_that_cannot_be(tmp_path: Path) -> None:
    check_client_socket(None)
    check_client_socket(str(tmp_path / "new.sock"))
    with pytest.raises(UsageError, match="does not exist"):
        check_client_socket(str(tmp_path / "none" / "new.sock"))
    for name in ("notes", "link"):
        path = tmp_path / name
        path.symlink_to(tmp_path / "notes") if name == "link" else path.write_text("precious")
        with pytest.raises(UsageError, match=f"{name}: is there, and is no socket"):
            check_client_socket(str(path))


def test_keys_are_masked_in_the_title() -> None:
    argv = ["/bin/tercet", "serve", "m", "--api-key", "a", "--api-key=b", "--port", "1", "--api-key", "--x"]
    assert process_title(argv) == "tercet serve m --api-key *** --api-key=*** --port 1 --api-key ***"


def test_the_line_to_try_is_valid_json() -> None:
    for chat in (True, False):
        line = try_line("http://x:1", 'a "name"', chat=chat)
        assert json.loads(line.split("-d ")[1].strip("'"))["model"] == 'a "name"'
