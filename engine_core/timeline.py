"""A trace of steps that a person can open in a trace viewer (Chrome's JSON trace event format)."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from engine_core.executor_client import SentPlan
from engine_core.wire.executor import StepResult

MAX_SPANS: Final = 200_000

Lane = Literal["executor", "core"]
LANES: Final[tuple[Lane, ...]] = ("executor", "core")


class Span(Struct, frozen=True):
    """Something that took time.

    Attributes:
        lane: the row it is drawn in.
        name: "step" and "idle" of the executor, "schedule" and "update" of the core.
        start_ns, end_ns: monotonic clock.
        args: numbers shown with it.
    """

    lane: Lane
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, int]


class Timeline:
    """The latest MAX_SPANS spans, kept in memory until `write`.

    Args:
        path: the file; it is created at once, so that a wrong path shows at the start.
        max_spans: how many are kept; older ones are forgotten and counted.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, max_spans: int = MAX_SPANS) -> None:
        path.touch()
        self._path = path
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._added = 0
        self._step_end_ns: int | None = None

    def add(self, lane: Lane, name: str, start_ns: int, end_ns: int, **args: int) -> None:
        """Keep a span."""
        self._added += 1
        self._spans.append(Span(lane, name, start_ns, end_ns, args))

    def add_step(self, result: StepResult, plan: SentPlan) -> None:
        """Keep a step of the executor, and the gap before it in which the device had nothing to do.

        The gap is the engine's own doing if the plan was `queued` behind another one, else a lack of requests.
        `bucket` is how many rows the step was padded to, 0 where it ran as it is.
        """
        start_ns, end_ns = result.started_ns, result.ended_ns
        if self._step_end_ns is not None and start_ns > self._step_end_ns:
            self.add("executor", "idle", self._step_end_ns, start_ns, step=plan.step, queued=int(plan.queued))
        self._step_end_ns = end_ns
        self.add(
            "executor",
            "step",
            start_ns,
            end_ns,
            step=plan.step,
            tokens=plan.tokens,
            rows=plan.rows,
            bucket=result.bucket,
        )

    def write(self) -> None:
        """Write the file; it is whole or unchanged.

        Raises:
            OSError: it cannot be written.
        """
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(LANES)
        ]
        trace = {
            "displayTimeUnit": "ms",
            "otherData": {"spans_forgotten": self._added - len(self._spans)},
            "traceEvents": names + [_event(span) for span in self._spans],
        }
        unfinished = self._path.with_name(self._path.name + ".part")
        unfinished.write_bytes(msgspec.json.encode(trace))
        unfinished.replace(self._path)


def _event(span: Span) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "pid": 1,
        "tid": LANES.index(span.lane),
        "ts": span.start_ns / 1000,
        "dur": max(span.end_ns - span.start_ns, 0) / 1000,
        "args": span.args,
    }
