"""Processes of a real server: who is who, what they load, how they start, are refused and end."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server import ROOT, Server, wait_for
from tests.fixtures.bad import BAD, Bad
from tests.fixtures.families import edit_config
from tests.model_executor.tools.folders import write_model

SECRET = "key-that-nobody-may-see"
REFUSED_WITHIN_S = 20.0


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def run(*arguments: str, deadline_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """`tercet ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "frontend", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )


@pytest.fixture(scope="module")
def server(chain_folder: Path) -> Server:
    """A server with a key; the last test of the file ends it."""
    flags = ("--num-kv-blocks", "64", "--api-key", SECRET)
    return Server(chain_folder, *flags, environment={"TERCET_API_KEY": f"{SECRET}-2"})


@pytest.fixture(scope="module", autouse=True)
def stopped(server: Server) -> object:
    """Whatever happens, the server does not outlive the file."""
    yield
    server.stop()


def test_each_process_is_the_child_of_the_one_before(server: Server) -> None:
    frontend, core, executor = server.wait_ready().tree()
    assert core.cmdline()[1:3] == ["-m", "engine_core"]
    assert executor.cmdline()[1:3] == ["-m", "model_executor"]
    assert frontend.cmdline()[0].split()[:2] == ["tercet", "serve"]
    assert executor.children() == []


def test_no_process_shows_a_key(server: Server) -> None:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=30, check=True).stdout
    assert "tercet serve" in listing
    assert SECRET not in listing
    assert SECRET not in server.log()


def test_a_key_guards_the_api(server: Server) -> None:
    body = {"model": "x", "prompt": "a", "max_tokens": 1}
    assert server.post("/v1/completions", body).status_code == 401
    for key, status in ((f"{SECRET}-", 401), (SECRET, 404), (f"{SECRET}-2", 404)):
        headers = {"authorization": f"Bearer {key}"}
        assert server.post("/v1/completions", body, headers=headers).status_code == status
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200


@pytest.mark.parametrize("place", [0, 1])
def test_frontend_and_core_have_no_torch_in_memory(server: Server, place: int) -> None:
    maps = Path(f"/proc/{server.tree()[place].pid}/maps").read_text(encoding="utf-8")
    assert "/site-packages/" in maps
    assert "torch" not in maps


def test_the_executor_has_torch_in_memory(server: Server) -> None:
    assert "torch" in Path(f"/proc/{server.tree()[2].pid}/maps").read_text(encoding="utf-8")


def test_sockets_are_private(server: Server) -> None:
    (folder,) = server.runtime.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    listening = {
        connection.laddr.port
        for process in server.tree()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {int(server.url.rsplit(":", 1)[1])}


def test_a_second_server_on_the_port_is_refused_at_once(server: Server, chain_folder: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    started = time.monotonic()
    done = run("serve", str(chain_folder), "--port", port)
    assert time.monotonic() - started < 5
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200


def test_clean_end_on_sigterm(server: Server) -> None:
    processes = list(server.tree())
    server.signal(signal.SIGTERM)
    assert server.wait_end() == 0
    assert alive(processes) == []
    assert server.leftovers() == []


def test_clean_end_on_ctrl_c_while_loading(chain_folder: Path) -> None:
    with Server(chain_folder, "--num-kv-blocks", "64") as server:
        wait_for("the executor's process", lambda: len(server.children()) == 2, 60)
        processes = server.children()
        server.signal(signal.SIGINT)
        assert server.wait_end() == 0
        assert alive(processes) == []
        assert server.leftovers() == []


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_death_of_a_child_ends_everything_and_clients_hear_of_it(chain_folder: Path, victim: int) -> None:
    flags = ("--num-kv-blocks", "64", "--served-model-name", "chain", "--max-restarts", "0")
    with Server(chain_folder, *flags) as server:
        processes = list(server.wait_ready().tree())
        body = {"model": "chain", "prompt": "a", "max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            processes[victim].kill()
            rest = list(lines)
        assert any('"error"' in line for line in rest) or sum(line.startswith("data: {") for line in rest) >= 899
        assert server.wait_end(15) == 4
        assert alive(processes) == []
        assert server.leftovers() == []


def test_death_of_the_frontend_takes_the_others_along(chain_folder: Path) -> None:
    with Server(chain_folder, "--num-kv-blocks", "64") as server:
        processes = list(server.wait_ready().tree())
        processes[0].kill()
        server.process.wait(10)
        wait_for("the end of core and executor", lambda: alive(processes) == [], 5)


# Refused by the frontend for its files and fields, and by the executor for a header and for a tensor.
REFUSED = ("no_folder", "config_no_json", "no_tokenizer", "unknown_rope", "cut_header", "wrong_shape")
FOLDERS = [pytest.param(bad, id=bad.name, marks=() if bad.name in REFUSED else pytest.mark.slow) for bad in BAD]


@pytest.mark.parametrize("bad", FOLDERS)
def test_a_broken_folder_is_refused_with_its_fault(tmp_path: Path, rand_folder: Path, bad: Bad) -> None:
    folder = shutil.copytree(rand_folder, tmp_path / "model")
    bad.apply(folder)
    started = time.monotonic()
    done = run("serve", str(folder), "--port", "0")
    assert time.monotonic() - started < REFUSED_WITHIN_S
    assert done.returncode == 3, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    for name in bad.names:
        assert name in last
    assert "Traceback" not in done.stderr


def test_a_known_family_needs_no_code_of_its_folder(tmp_path: Path) -> None:
    """As DeepSeek V3 is published. Of an architecture that is not known, the name is told."""
    folder = write_model(tmp_path / "model", "deepseek-v3")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"})
    (folder / "modeling_deepseek.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with Server(folder, "--num-kv-blocks", "64") as server:
        answer = server.wait_ready().post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        assert "auto_map is ignored" in server.log()
    edit_config(folder, architectures=["ParrotForCausalLM"], model_type="parrot")
    done = run("serve", str(folder), "--port", "0")
    assert done.returncode == 3, done.stderr
    assert "ParrotForCausalLM is unknown" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--prot", "80"), ("--prot", "--port")),
        (("--port", "70000"), ("--port", "70000", "65535")),
        (("--dtype", "float23"), ("--dtype", "float23", "float32")),
        (("--max-num-seqs", "many"), ("--max-num-seqs", "many")),
        (("--config", "/nowhere/config.json"), ("/nowhere/config.json",)),
        (("--client-socket", "/nowhere/at/all.sock"), ("--client-socket", "/nowhere/at/all.sock")),
    ],
)
def test_wrong_usage_is_refused_by_name(chain_folder: Path, arguments: tuple[str, ...], names: tuple[str, ...]) -> None:
    port = () if "--port" in arguments else ("--port", "0")
    done = run("serve", str(chain_folder), *port, *arguments)
    assert done.returncode == 2, done.stderr
    for name in names:
        assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_model_cannot_hold_is_refused_with_the_number(chain_folder: Path) -> None:
    done = run("serve", str(chain_folder), "--port", "0", "--max-model-len", "999999")
    assert done.returncode == 3, done.stderr
    assert "max_model_len" in done.stderr.replace("-", "_")
    assert "1024" in done.stderr


def test_two_servers_live_side_by_side(chain_folder: Path) -> None:
    with Server(chain_folder, "--num-kv-blocks", "64") as one, Server(chain_folder, "--num-kv-blocks", "64") as two:
        assert one.wait_ready().url != two.wait_ready().url
        with socket.create_connection(("127.0.0.1", int(two.url.rsplit(":", 1)[1])), timeout=5):
            one.signal(signal.SIGTERM)
            assert one.wait_end() == 0
        assert httpx.get(f"{two.url}/ready", timeout=10).status_code == 200
