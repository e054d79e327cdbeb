"""The timeline is a file that trace viewers open, bounded, and whole or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_core.executor_client import SentPlan
from engine_core.timeline import Timeline
from engine_core.wire.executor import StepResult


def result(step: int, started_ns: int, ended_ns: int, bucket: int = 0) -> StepResult:
    return StepResult(1, step, [], None, started_ns, ended_ns, bucket)


def events(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_bytes())["traceEvents"] if event["ph"] == "X"]


def test_steps_and_the_gaps_between_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path)
    timeline.add_step(result(1, 1_000, 5_000), SentPlan(1, 30, 2, queued=False))
    timeline.add_step(result(2, 7_000, 9_000), SentPlan(2, 2, 2, queued=True))
    timeline.add_step(result(3, 9_000, 9_500, bucket=4), SentPlan(3, 2, 2, queued=True))
    timeline.write()
    assert [(event["name"], event["ts"], event["dur"], event["args"]) for event in events(path)] == [
        ("step", 1.0, 4.0, {"step": 1, "tokens": 30, "rows": 2, "bucket": 0}),
        ("idle", 5.0, 2.0, {"step": 2, "queued": 1}),
        ("step", 7.0, 2.0, {"step": 2, "tokens": 2, "rows": 2, "bucket": 0}),
        ("step", 9.0, 0.5, {"step": 3, "tokens": 2, "rows": 2, "bucket": 4}),
    ]


def test_lanes_have_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path)
    timeline.add("core", "schedule", 1_000, 2_000, step=1)
    timeline.write()
    trace = json.loads(path.read_bytes())
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    (event,) = events(path)
    assert names[event["tid"]] == "core"
    assert set(names.values()) == {"executor", "core"}


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = Timeline(path, max_spans=3)
    for step in range(10):
        timeline.add("core", "schedule", step, step + 1, step=step)
    timeline.write()
    assert [event["args"]["step"] for event in events(path)] == [7, 8, 9]
    assert json.loads(path.read_bytes())["otherData"]["spans_forgotten"] == 7


def test_a_path_that_cannot_be_written_shows_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Timeline(tmp_path / "none" / "trace.json")


def test_nothing_but_the_file_is_left(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    timeline.write()
    timeline.write()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
