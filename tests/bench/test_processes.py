"""Processes as the system sees them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from bench.processes import cpu_ns, descendants, look, look_below
from tests.fakes.waiting import until

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


def test_descendants_are_found_over_generations() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE) as child:
        until("the grandchild runs", lambda: len(descendants(child.pid)) == 1)
        below = descendants(os.getpid())
        assert {child.pid, *descendants(child.pid)} <= set(below)
        seen = {one.pid: one for one in look_below(os.getpid())}
        child.communicate(b"\n", timeout=10)
    assert seen[child.pid].rss > 2**20
    assert 0 < seen[child.pid].pss <= seen[child.pid].rss
    assert look(child.pid) is None


def test_roles_are_told_from_the_command_line() -> None:
    words = [sys.executable, "-c", "input()", "-m engine_core"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as child:
        until("it runs", lambda: (found := look(child.pid)) is not None and found.role == "core")
        child.communicate(b"\n", timeout=10)


def test_processor_time_is_that_of_all_threads() -> None:
    before, own = cpu_ns(os.getpid()), time.process_time_ns()
    while time.process_time_ns() - own < 50_000_000:
        pass
    spent = cpu_ns(os.getpid()) - before
    assert spent == pytest.approx(time.process_time_ns() - own, rel=0.5)
