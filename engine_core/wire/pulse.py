"""Whether a process is able to run, as the kernel shows it: signs that need no help from the process itself.

A process that was stopped (SIGSTOP, a debugger) says so in /proc. One that computes, however long its step takes, uses
processor time. So neither a long step nor a slow machine looks like a hang.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from msgspec import Struct

STOPPED_STATES: Final = ("T", "t")


class Sample(Struct, frozen=True):
    """One look at /proc/PID/stat.

    Attributes:
        state: one letter, as in ps.
        ticks: processor time used by all threads so far, in clock ticks.
    """

    state: str
    ticks: int


def sample(pid: int) -> Sample | None:
    """Look at a process; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in brackets, may hold anything; what follows the last bracket is fields 3 and up.
    fields = text.rpartition(")")[2].split()
    return Sample(fields[0], int(fields[11]) + int(fields[12]))


class Pulse:
    """Since when a process has been stopped, or without processor time.

    Args:
        pid: of the process.
        now: monotonic seconds.

    Attributes:
        stopped: whether the latest look found it stopped.
    """

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._running_at = now
        self._busy_at = now
        self._ticks = -1
        self.stopped = False

    def look(self, now: float) -> None:
        """Take a sample."""
        seen = sample(self._pid)
        self.stopped = seen is not None and seen.state in STOPPED_STATES
        if not self.stopped:
            self._running_at = now
        if seen is None or seen.ticks != self._ticks:
            self._busy_at = now
            self._ticks = -1 if seen is None else seen.ticks

    def stopped_s(self, now: float) -> float:
        """Seconds for which it has been stopped, 0 while it runs."""
        return now - self._running_at if self.stopped else 0.0

    def idle_s(self, now: float) -> float:
        """Seconds since it last used processor time."""
        return now - self._busy_at

    def forgive(self, seconds: float) -> None:
        """Nobody looked for so long: that time counts for nothing."""
        self._running_at += seconds
        self._busy_at += seconds
