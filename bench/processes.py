"""The processes of a server as the system sees them: memory and processor time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from msgspec import Struct

PROC: Final = Path("/proc")
KIB: Final = 1024
# What the process list shows of each process; the first that fits counts.
ROLES: Final = {
    "-m engine_core": "core",
    "-m model_executor": "executor",
    "-m tests.fakes.executor": "executor",
    "tercet serve": "frontend",
}


class Process(Struct, frozen=True):
    """One process at one moment.

    Attributes:
        pid: of it.
        role: "frontend", "core" or "executor", else what the process list shows.
        rss: bytes in memory.
        pss: the same with shared pages divided among those who share them: these may be added up.
        cpu_s: processor seconds since it started.
    """

    pid: int
    role: str
    rss: int
    pss: int
    cpu_s: float


def descendants(pid: int) -> list[int]:
    """All processes below one, in no order."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _parent(entry: Path) -> int | None:
    try:
        text = (entry / "stat").read_text()
    except OSError:
        return None  # It has ended.
    # The name in brackets may hold anything.
    return int(text.rpartition(")")[2].split()[1])


def look(pid: int) -> Process | None:
    """One process; None: it has ended."""
    entry = PROC / str(pid)
    try:
        words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        rollup = (entry / "smaps_rollup").read_text()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) * KIB for line in rollup.splitlines()[1:]}
    ticks = int(fields[11]) + int(fields[12])
    return Process(pid, _role(words), sizes["Rss"], sizes["Pss"], ticks / os.sysconf("SC_CLK_TCK"))


def _role(words: str) -> str:
    for mark, role in ROLES.items():
        if mark in words:
            return role
    return words[:60]


def look_below(pid: int) -> list[Process]:
    """All living processes below one."""
    return [found for each in descendants(pid) if (found := look(each)) is not None]


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process, from the scheduler's own count, which is finer than its ticks.

    Raises:
        OSError: it has ended.
    """
    tasks = PROC / str(pid) / "task"
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())
