"""The start in lines."""

from __future__ import annotations

from typing import get_args

import pytest

from engine_core.wire.client import Progress
from engine_core.wire.reports import Phase
from frontend.progress import NAMES, StartProgress


def test_one_line_for_each_phase() -> None:
    lines: list[str] = []
    times = iter([0.0, 0.0, 1.0, 1.0, 3.5, 4.0, 4.5])
    progress = StartProgress(lines.append, bar=False, clock=lambda: next(times))
    progress(Progress("plan", 1, 1))
    progress(Progress("load", 0, 270_000_000, "bytes"))
    progress(Progress("load", 100, 270_000_000, "bytes"))
    progress(Progress("load", 270_000_000, 270_000_000, "bytes"))
    progress(Progress("warm_up", 0, 0))
    assert lines == ["planning the load: 1.0 s", "loading weights: 2.5 s, 270 MB"]


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    progress = StartProgress(lines.append, bar=True)
    progress(Progress("load", 50, 100, "bytes"))
    assert "loading weights" in capsys.readouterr().err
    progress(Progress("load", 100, 100, "bytes"))
    progress.close()
    assert len(lines) == 1


def test_every_phase_has_a_name() -> None:
    assert NAMES.keys() >= set(get_args(Phase))
