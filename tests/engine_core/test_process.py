"""What a core process needs of files: its configuration, its sockets and its trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core.wire.config import EngineConfig
from engine_core.wire.transport import CORE_SOCKET, EXECUTOR_SOCKET
from tests.fakes.core_process import core_arguments, fake_model, running_core

SLOW = EngineConfig(model=fake_model("delay_s=0.005"))


def left_over(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"engine.json"}


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"{", "engine.json"), (b'{"cache": {"block_size": 0}}', "block_size"), (b'{"colour": 1}', "colour")],
)
def test_a_wrong_configuration(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "engine.json").write_bytes(content)
    ended = subprocess.run(
        [sys.executable, *core_arguments(tmp_path)], stderr=subprocess.PIPE, timeout=10.0, check=False, text=True
    )
    assert ended.returncode == 2
    assert named in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert left_over(tmp_path) == set()


@pytest.mark.parametrize("option", ["--socket", "--trace-file"])
def test_a_path_that_cannot_be_made(tmp_path: Path, option: str) -> None:
    with running_core(tmp_path, SLOW, [option, str(tmp_path / "none" / "x")]) as core:
        assert core.child.wait(10.0) == 2


def test_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    with running_core(tmp_path, SLOW, ["--socket", str(tmp_path / ("x" * 108))]) as core:
        assert core.child.wait(10.0) == 2


def test_the_trace_shows_steps_of_the_executor_and_work_of_the_core(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with running_core(tmp_path, SLOW, ["--trace-file", str(trace)]) as core:
        client = core.client()
        client.connect()
        client.submit("a", [1, 2, 3])
        client.finish("a")
        assert core.end() == 0
    events = json.loads(trace.read_bytes())["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert [event["args"]["step"] for event in steps] == list(range(1, 9))
    assert all(event["dur"] >= 5000 for event in steps)
    assert {"idle", "schedule", "update"} <= {event["name"] for event in events}
    # With two plans out, what lies between two steps is the executor's own.
    assert all(event["args"]["queued"] for event in events if event["name"] == "idle")


def test_sockets_of_an_earlier_core_are_no_obstacle(tmp_path: Path) -> None:
    """One that was killed leaves them behind."""
    for name in (CORE_SOCKET, EXECUTOR_SOCKET):
        (tmp_path / name).touch()
    with running_core(tmp_path, SLOW) as core:
        core.client().connect()
        assert core.end() == 0
    assert left_over(tmp_path) == set()


def test_a_client_socket_elsewhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with running_core(tmp_path, SLOW, ["--socket", str(elsewhere / "s")]) as core:
        core.socket = elsewhere / "s"
        core.client().connect()
        assert core.end() == 0
    assert left_over(elsewhere) == set()
