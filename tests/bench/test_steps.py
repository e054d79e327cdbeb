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


def trace(folder: Path, *, queued: bool = True) -> Path:
    """Steps of 2 rows with gaps of 10, 30 and 0 us after another one, and others that do not count."""
    path = folder / "trace.json"
    timeline = Timeline(path)
    now = 0
    for step, (gap, spent, rows, tokens) in enumerate(
        [(0, 100, 2, 40), (900, 100, 2, 2), (10, 200, 2, 2), (30, 100, 2, 2), (0, 100, 2, 2), (5, 50, 1, 1)]
    ):
        began, now = now + gap * US, now + (gap + spent) * US
        timeline.add_step(StepResult(1, step, [], None, began, now), SentPlan(step, tokens, rows, queued))
    timeline.write()
    return path


@pytest.mark.parametrize("queued", [True, False])
def test_a_step_counts_that_follows_one_of_the_same_rows_whether_planned_by_then_or_not(
    tmp_path: Path, *, queued: bool
) -> None:
    steps = read_steps(trace(tmp_path, queued=queued), 2)
    assert steps is not None
    assert (steps.rows, steps.count) == (2, 3)
    assert (steps.median_step_us, steps.median_gap_us) == (100.0, 10.0)
    assert steps.gap_share == pytest.approx(40 / 400)


def test_a_trace_without_such_steps_gives_nothing(tmp_path: Path) -> None:
    assert read_steps(trace(tmp_path), 3) is None


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[]")
    for missing in (path, tmp_path / "nothing"):
        with pytest.raises(RecordInvalid, match=str(missing)):
            read_steps(missing, 1)
