"""The cells of the fault matrix: which process, which fault, at which moment."""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass
from typing import Final

PROCESSES: Final = ("executor", "core", "frontend")
FAULTS: Final = ("kill", "stop", "term", "exit", "garbage", "version")
PHASES: Final = ("idle", "loading", "prefill", "decode", "preempted", "recovering", "draining")


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    process: str
    fault: str
    phase: str

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.process}-{self.fault}-{self.phase}"

    @property
    def pid_changes(self) -> bool:
        """Whether the process has to be replaced."""
        ends_process = {
            "executor": ("kill", "stop", "term", "exit", "version"),
            "core": ("kill", "stop", "term", "exit"),
        }
        return self.fault in ends_process.get(self.process, ())

    @property
    def ends(self) -> int | None:
        """The exit status of the server, where the fault ends it by right; None: it goes on."""
        if self.process == "frontend":
            return {"kill": -signal.SIGKILL, "exit": -signal.SIGABRT, "term": 0}.get(self.fault)
        if self.process == "executor" and self.phase == "loading":
            # What an executor does or says by itself at the first start would happen again.
            return {"exit": 4, "version": 3}.get(self.fault)
        return None


def all_cases() -> list[Case]:
    """The whole matrix."""
    return [Case(*cell) for cell in itertools.product(PROCESSES, FAULTS, PHASES)]
