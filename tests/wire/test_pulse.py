"""What the kernel shows of a process: stopped, idle, or at work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine_core.wire.pulse import STOPPED_STATES, Pulse, sample
from tests.fakes.waiting import until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_sample_of_this_process() -> None:
    seen = sample(os.getpid())
    assert seen is not None
    assert seen.state == "R"
    assert seen.ticks > 0


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert sample(process.pid) is None


def is_stopped(pid: int) -> bool:
    seen = sample(pid)
    return seen is not None and seen.state in STOPPED_STATES


def test_stopped_and_continued(sleeper: subprocess.Popen[bytes]) -> None:
    pulse = Pulse(sleeper.pid, 100.0)
    pulse.look(101.0)
    assert (pulse.stopped, pulse.stopped_s(101.0)) == (False, 0.0)
    sleeper.send_signal(signal.SIGSTOP)
    until("it is stopped", lambda: is_stopped(sleeper.pid))
    pulse.look(103.0)
    assert (pulse.stopped, pulse.stopped_s(104.0)) == (True, 3.0)
    pulse.forgive(2.0)
    assert pulse.stopped_s(104.0) == 1.0
    sleeper.send_signal(signal.SIGCONT)
    until("it goes on", lambda: not is_stopped(sleeper.pid))
    pulse.look(109.0)
    assert pulse.stopped_s(110.0) == 0.0


def test_idle_is_without_processor_time(sleeper: subprocess.Popen[bytes]) -> None:
    asleep, awake = Pulse(sleeper.pid, 100.0), Pulse(os.getpid(), 100.0)
    asleep.look(101.0)
    awake.look(101.0)
    asleep.look(105.0)
    assert asleep.idle_s(105.0) == 4.0
    before = sample(os.getpid())
    until("some time is used", lambda: sample(os.getpid()) != before)
    awake.look(105.0)
    assert awake.idle_s(105.0) == 0.0


def test_a_process_that_is_gone_is_not_stuck() -> None:
    pulse = Pulse(2**22 + 1, 0.0)
    pulse.look(50.0)
    assert (pulse.stopped, pulse.idle_s(50.0)) == (False, 0.0)
