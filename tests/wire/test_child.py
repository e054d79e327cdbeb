"""A child cannot outlive its parent, is seen to end, and is ended within a deadline."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine_core.wire.child import EXIT_ORPHANED, Child, bind_to_parent, ending
from tests.fakes.waiting import gone, until

SLEEP = "import time; time.sleep(600)"
# A child as ours are: tied to its parent, and telling through a file that it is.
BOUND = """
import sys, time
from pathlib import Path
from engine_core.wire.child import bind_to_parent
bind_to_parent(int(sys.argv[-1]))
Path(sys.argv[1]).touch()
time.sleep(600)
"""


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """Children that end with the test."""
    started: list[Child] = []
    yield started
    for child in started:
        child.end(0.0)


def spawn(children: list[Child], *arguments: str) -> Child:
    child = Child.spawn("sleeper", arguments)
    children.append(child)
    return child


def spawn_bound(children: list[Child], folder: Path) -> Child:
    child = spawn(children, "-c", BOUND, str(folder / "bound"))
    until("the child is bound", (folder / "bound").exists)
    return child


@pytest.mark.parametrize("status", [0, 3, 75])
def test_exit_status(children: list[Child], status: int) -> None:
    child = spawn(children, "-c", f"raise SystemExit({status})")
    assert child.wait(10.0) == status
    assert child.status() == status


def test_the_sentinel_turns_readable_at_the_end(children: list[Child]) -> None:
    child = spawn(children, "-c", SLEEP)
    assert select.select([child.fileno()], [], [], 0)[0] == []
    assert child.status() is None
    assert child.wait(0.01) is None
    child.signal(signal.SIGKILL)
    assert select.select([child.fileno()], [], [], 10.0)[0] == [child.fileno()]
    assert child.status() == -signal.SIGKILL


def test_signals_to_an_ended_child_do_nothing(children: list[Child]) -> None:
    child = spawn(children, "-c", "")
    assert child.wait(10.0) == 0
    child.signal(signal.SIGTERM)
    assert child.end(1.0) == 0
    assert child.end(1.0) == 0


def test_end_asks_first(children: list[Child], tmp_path: Path) -> None:
    code = (
        "import signal, sys, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).touch()\n"
        "signal.pause()"
    )
    child = spawn(children, "-c", code)
    until("the handler is set", (tmp_path / "up").exists)
    assert child.end(10.0) == 7


def test_end_forces_a_deaf_child(children: list[Child], tmp_path: Path) -> None:
    code = (
        "import signal, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).touch()\n"
        "time.sleep(600)"
    )
    child = spawn(children, "-c", code)
    until("the signal is ignored", (tmp_path / "up").exists)
    began = time.monotonic()
    assert child.end(0.1) == -signal.SIGKILL
    assert 0.1 <= time.monotonic() - began < 5.0


def test_end_wakes_a_stopped_child(children: list[Child]) -> None:
    child = spawn(children, "-c", SLEEP)
    child.signal(signal.SIGSTOP)
    until("the child is stopped", lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    assert child.end(10.0) == -signal.SIGTERM


def test_a_child_leads_its_own_process_group(children: list[Child]) -> None:
    child = spawn(children, "-c", SLEEP)
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


def test_the_end_of_the_pipe_ends_the_child(children: list[Child], tmp_path: Path) -> None:
    child = spawn_bound(children, tmp_path)
    process = psutil.Process(child.pid)
    child.close()
    assert process.wait(5.0) == EXIT_ORPHANED


def test_death_of_the_parent_ends_the_child(tmp_path: Path) -> None:
    """Even a child whose interpreter does not run dies: the kernel sees to it."""
    stuck = BOUND.replace("time.sleep(600)", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    code = (
        "import time\n"
        "from engine_core.wire.child import Child\n"
        f"print(Child.spawn('grandchild', ['-c', {stuck!r}, {str(tmp_path / 'bound')!r}]).pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        until("the grandchild is stuck", lambda: psutil.Process(grandchild).status() == psutil.STATUS_STOPPED)
        parent.kill()
    until("the grandchild is gone", lambda: gone(grandchild), 5.0)


def test_a_parent_that_died_before_the_child_was_bound() -> None:
    """The death signal misses this; the pipe does not."""
    child_end, lifeline = os.pipe()
    code = (
        "import sys, time\n"
        "from engine_core.wire.child import bind_to_parent\n"
        "bind_to_parent(int(sys.argv[1]))\n"
        "time.sleep(600)"
    )
    os.close(lifeline)
    with subprocess.Popen([sys.executable, "-c", code, str(child_end)], pass_fds=[child_end]) as orphan:
        os.close(child_end)
        assert orphan.wait(10.0) == EXIT_ORPHANED


def test_binding_to_no_descriptor_fails() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        bind_to_parent(9999)


def test_a_sibling_does_not_hold_the_pipe_open(children: list[Child], tmp_path: Path) -> None:
    first = spawn_bound(children, tmp_path)
    spawn(children, "-c", SLEEP)
    process = psutil.Process(first.pid)
    first.close()
    assert process.wait(5.0) == EXIT_ORPHANED


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only


def test_no_descriptor_is_left_over() -> None:
    before = descriptors()
    for _ in range(3):
        child = Child.spawn("brief", ["-c", ""])
        assert child.wait(10.0) == 0
        child.end(1.0)
    assert descriptors() == before


def test_no_descriptor_is_left_over_by_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        Child.spawn("none", [])
    assert descriptors() == before


def test_the_child_inherits_its_end_of_the_pipe_alone(children: list[Child], tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'fds')!r}, 'w').write(' '.join(os.listdir('/proc/self/fd')) + '\\n')"
    child = spawn(children, "-c", code)
    assert child.wait(10.0) == 0
    # stdin, stdout, stderr, the pipe, the file, and the listing itself.
    assert len((tmp_path / "fds").read_text().split()) <= 6


def test_a_high_descriptor_can_be_waited_for(children: list[Child]) -> None:
    """select() takes none above 1023, and a server with many connections hands out such."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        child = spawn(children, "-c", SLEEP)
        assert child.fileno() > 1023
        assert child.wait(0.01) is None
        assert child.end(10.0) == -signal.SIGTERM
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_exit_status_in_words() -> None:
    assert [ending(0), ending(3), ending(-9)] == ["exit status 0", "exit status 3", "signal 9"]
