"""Steps under torch's profiler: one line of JSON for each in a file. Only for runs that ask for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from engine_core.wire.evidence import OUTSIDE, OperatorRun, StepKind, StepProfile
from engine_core.wire.executor import StepPlan, StepResult
from model_executor.errors import DeviceUnavailable
from model_executor.marks import CLASS, KERNEL, LOGITS, OPERATOR, SAMPLING
from model_executor.runner import Runner

log = logging.getLogger(__name__)

T = TypeVar("T")

# A file that is forgotten must not fill the disk.
MAX_STEPS: Final = 100_000
# Parts of the names of CUDA's own calls.
REPLAY: Final = "GraphLaunch"
CAPTURE: Final = "BeginCapture"
# The profiler's own events and the marks are no operators of torch.
NATIVE_PREFIX: Final = "aten::"


@dataclass
class Tally:
    """Sums of one operator in one step; fields as of OperatorRun."""

    count: int = 0
    host_us: float = 0.0
    device_us: float = 0.0
    kernel: str = ""
    native: set[str] = field(default_factory=set)


class StepProfiler:
    """Writes the file.

    Args:
        path: of the file; an old one is replaced.
        device: that the steps run on.

    Raises:
        DeviceUnavailable: the file cannot be written.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        try:
            path.write_bytes(b"")
        except OSError as error:
            raise DeviceUnavailable("profile_file", path, error.strerror or str(error)) from error
        self._path = path
        cuda = (ProfilerActivity.CUDA,) if device.type == "cuda" else ()
        self._activities = (ProfilerActivity.CPU, *cuda)
        self._steps = 0

    def run(self, act: Callable[[], T], plan: StepPlan | None) -> T:
        """Do it, and write what was seen.

        Args:
            act: the whole step, waiting for its result included.
            plan: of the step; None: the warm-up.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            return act()
        with profile(activities=self._activities) as seen:
            result = act()
        bucket = result.bucket if isinstance(result, StepResult) else 0
        line = msgspec.json.encode(summarize(seen.events() or (), plan, bucket))
        with self._path.open("ab") as file:
            file.write(line + b"\n")
        return result


class ProfiledRunner:
    """A runner whose steps are profiled.

    Args:
        runner: that runs them.
        profiler: that watches.
    """

    def __init__(self, runner: Runner, profiler: StepProfiler) -> None:
        self._runner = runner
        self._profiler = profiler

    @property
    def depth(self) -> int:
        """A step is whole before the next one."""
        return 1

    def launch(self, plan: StepPlan) -> StepResult:
        """Run a step from its beginning to its end."""
        return self._profiler.run(lambda: self._runner.execute(plan), plan)

    def collect(self, launched: StepResult) -> StepResult:
        """What `launch` gave."""
        return launched

    def execute(self, plan: StepPlan) -> StepResult:
        """See Runner."""
        return self.launch(plan)

    def explain(self) -> list[str]:
        """See Runner."""
        return self._runner.explain()


def summarize(events: Sequence[FunctionEvent], plan: StepPlan | None, bucket: int = 0) -> StepProfile:
    """What the events of a step say.

    Args:
        events: of torch's profiler.
        plan: of the step; None: the warm-up.
        bucket: rows that it was padded to; 0: none.
    """
    tallies: dict[tuple[str, str], Tally] = {}
    for event in events:
        if event.name.startswith(OPERATOR):
            _count(tallies, event)
    for event in events:
        if event.name.startswith((NATIVE_PREFIX, KERNEL)):
            _attribute(tallies, event)
    _sampling(tallies, events)
    names = [event.name for event in events]
    counts = [] if plan is None else [row.count for row in plan.rows]
    return StepProfile(
        step=0 if plan is None else plan.step,
        kind="warm_up" if plan is None else kind_of(counts),
        chunked=plan is not None and any(row.count > 1 and (row.start > 0 or not row.sample) for row in plan.rows),
        tokens=sum(counts),
        rows=len(counts),
        graphs=sum(REPLAY in name for name in names),
        bucket=bucket,
        captured=any(CAPTURE in name for name in names),
        operators=[
            OperatorRun(
                layer_class=key[0],
                operator=key[1],
                kernel=tally.kernel,
                count=tally.count,
                host_ns=round(tally.host_us * 1000),
                device_ns=round(tally.device_us * 1000),
                native=sorted(tally.native),
            )
            for key, tally in tallies.items()
        ],
    )


def kind_of(counts: Iterable[int]) -> StepKind:
    """The kind of a step whose rows compute so many tokens."""
    single = {count == 1 for count in counts}
    return "mixed" if len(single) > 1 else "decode" if True in single else "prefill"


def _count(tallies: dict[tuple[str, str], Tally], event: FunctionEvent) -> None:
    tally = tallies.setdefault(_key(event), Tally())
    tally.count += 1
    tally.host_us += event.cpu_time_total
    tally.device_us += event.device_time_total
    # An operator within an operator counts for itself alone.
    above = next((each for each in _above(event) if each.name.startswith(OPERATOR)), None)
    if above is not None:
        outer = tallies.setdefault(_key(above), Tally())
        outer.host_us -= event.cpu_time_total
        outer.device_us -= event.device_time_total


def _attribute(tallies: dict[tuple[str, str], Tally], event: FunctionEvent) -> None:
    above = next((each for each in _above(event) if each.name.startswith(OPERATOR)), None)
    if above is None:
        return
    tally = tallies[_key(above)]
    if event.name.startswith(KERNEL):
        tally.kernel = event.name.removeprefix(KERNEL)
        return
    tally.native.add(event.name)
    tally.native.update(kernel.name for kernel in event.kernels)


def _key(event: FunctionEvent) -> tuple[str, str]:
    inside = (each.name.removeprefix(CLASS) for each in _above(event) if each.name.startswith(CLASS))
    return next(inside, OUTSIDE), event.name.removeprefix(OPERATOR)


def _above(event: FunctionEvent) -> Iterator[FunctionEvent]:
    parent = event.cpu_parent
    while parent is not None:
        yield parent
        parent = parent.cpu_parent


def _sampling(tallies: dict[tuple[str, str], Tally], events: Sequence[FunctionEvent]) -> None:
    """What follows the logits on the step's own level is the sampling; the sampler itself stays free of marks."""
    ends = [event.time_range.end for event in events if event.name == LOGITS]
    if not ends:
        return
    after = [
        event
        for event in events
        if event.cpu_parent is None and event.name.startswith(NATIVE_PREFIX) and event.time_range.start >= min(ends)
    ]
    if after:
        tallies[OUTSIDE, SAMPLING] = Tally(
            count=len(ends),
            host_us=sum(event.cpu_time_total for event in after),
            device_us=sum(event.device_time_total for event in after),
            native={event.name for event in after},
        )
