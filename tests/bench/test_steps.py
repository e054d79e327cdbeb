"""Steps out of a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import RecordInvalid
from bench.steps import read_steps
from engine_core.executor_client import SentPlan
from engine_core.timeline import Timeline
from engine_core.wire.executor import StepResult

US = 1000


def trace(folder: Path) -> Path:
    """Steps of 2 rows with gaps of 10 and 30 us, and others that do not count."""
    path = folder / "trace.json"
    timeline = Timeline(path)
    now = 0
    for step, (gap, spent, rows, tokens, queued) in enumerate(
        [
            (0, 100, 2, 40, True),
            (10, 200, 2, 2, True),
            (30, 100, 2, 2, True),
            (900, 100, 2, 2, False),
            (5, 50, 1, 1, True),
        ]
    ):
        began, now = now + gap * US, now + (gap + spent) * US
        timeline.add_step(StepResult(1, step, [], None, began, now), SentPlan(step, tokens, rows, queued))
    timeline.write()
    return path


def test_steps_that_were_queued_count_with_the_gap_before_them(tmp_path: Path) -> None:
    steps = read_steps(trace(tmp_path), 2)
    assert steps is not None
    assert (steps.rows, steps.count) == (2, 2)
    assert (steps.median_step_us, steps.median_gap_us) == (150.0, 20.0)
    assert steps.gap_share == pytest.approx(40 / 300)


def test_a_trace_without_such_steps_gives_nothing(tmp_path: Path) -> None:
    assert read_steps(trace(tmp_path), 3) is None


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[]")
    for missing in (path, tmp_path / "nothing"):
        with pytest.raises(RecordInvalid, match=str(missing)):
            read_steps(missing, 1)
