"""The start as the operator sees it: a bar on a terminal, else one line for each phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NoReturn

from tqdm import tqdm

from engine_core.wire.client import Progress
from engine_core.wire.reports import Phase

NAMES: Final[dict[Phase, str]] = {
    "start": "starting the executor",
    "plan": "planning the load",
    "build": "building the model",
    "load": "loading weights",
    "pack": "packing weights",
    "kv_cache": "making the KV cache",
    "warm_up": "warming up",
    "capture": "capturing graphs",
    "warm_run": "running once more",
}


class StartProgress:
    """Shows the Progress messages of a start.

    Args:
        say: prints a line.
        bar: whether to draw bars.
        clock: seconds, monotonic.
    """

    def __init__(self, say: Callable[[str], None], *, bar: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._draw = bar
        self._clock = clock
        self._phase: Phase | None = None
        self._since = clock()
        self._bar: tqdm[NoReturn] | None = None

    def __call__(self, progress: Progress) -> None:
        """Take one message."""
        if progress.phase != self._phase:
            self.close()
            self._phase, self._since = progress.phase, self._clock()
            if self._draw and progress.total:
                self._bar = _bar(progress)
        if self._bar is not None:
            self._bar.n = progress.done
            self._bar.refresh()
        if progress.total and progress.done >= progress.total:
            self._done(progress)

    def _done(self, progress: Progress) -> None:
        phase = self._phase
        self.close()
        if phase is not None:
            size = f", {progress.total / 1e6:.0f} MB" if progress.unit == "bytes" else ""
            self._say(f"{NAMES[phase]}: {self._clock() - self._since:.1f} s{size}")
        # Another message of the phase would be a new line; there is none after its end.
        self._phase = progress.phase

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar(progress: Progress) -> tqdm[NoReturn]:
    unit = "B" if progress.unit == "bytes" else "step"
    return tqdm(total=progress.total, desc=NAMES[progress.phase], unit=unit, unit_scale=True, leave=False)
