"""The steps of the executor, out of a trace file of `tercet serve --trace-file`."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.errors import RecordInvalid


class _Event(Struct):
    name: str
    dur: float = 0.0
    args: dict[str, int | str] = {}


class _Trace(Struct, rename={"events": "traceEvents"}):
    events: list[_Event]


class Steps(Struct, frozen=True):
    """Steps of so many rows, of one token each, that follow another such step.

    Attributes:
        rows: of each.
        count: of steps.
        median_step_us: their time; median_gap_us: between the end of the step before and their start.
        gap_share: sum of the gaps divided by the sum of the steps.
    """

    rows: int
    count: int
    median_step_us: float
    median_gap_us: float
    gap_share: float


def read_steps(path: Path, rows: int) -> Steps | None:
    """Steps of `rows` rows; None: the trace has none that follow another one at once.

    Raises:
        RecordInvalid: the file is no trace.
    """
    try:
        events = msgspec.json.decode(path.read_bytes(), type=_Trace).events
    except (OSError, msgspec.MsgspecError) as error:
        raise RecordInvalid(f"{path}: {error}") from error
    gaps = {event.args["step"]: event.dur for event in events if event.name == "idle"}
    busy_us = {
        event.args["step"]: event.dur
        for event in events
        if event.name == "step" and event.args["rows"] == rows == event.args["tokens"]
    }
    # Between two steps of the same rows the executor waited for the engine, not for requests.
    steps = [step for step in busy_us if int(step) - 1 in busy_us]
    if not steps:
        return None
    idle = [gaps.get(step, 0.0) for step in steps]
    busy = [busy_us[step] for step in steps]
    return Steps(rows, len(steps), statistics.median(busy), statistics.median(idle), sum(idle) / sum(busy))
