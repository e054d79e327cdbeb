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
    """Steps of so many rows, of one token each, that were planned while the step before them ran.

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
    # A plan that was not queued waited for requests, not for the engine.
    gaps = {event.args["step"]: event.dur for event in events if event.name == "idle" and event.args.get("queued")}
    steps = {
        event.args["step"]: event.dur
        for event in events
        if event.name == "step" and event.args["rows"] == rows == event.args["tokens"] and event.args["step"] in gaps
    }
    if not steps:
        return None
    idle = [gaps[step] for step in steps]
    busy = list(steps.values())
    return Steps(rows, len(steps), statistics.median(busy), statistics.median(idle), sum(idle) / sum(busy))
