"""Which operator of which class ran in which kind of step: the trace joined with the plan and the choice of kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from engine_core.wire.client import Inspection
from engine_core.wire.evidence import OUTSIDE, OperatorRun, StepKind, StepProfile
from engine_core.wire.reports import KernelChoice
from frontend.errors import EngineFailed
from frontend.proof.requests import Answered, longest_window
from frontend.proof.tools import Plan

PHASES: Final[tuple[StepKind, ...]] = ("prefill", "decode", "mixed")
# Operators of the registry that stand for others, which run one by one where the choice is to have no kernel for all.
PARTS: Final[Mapping[str, tuple[str, ...]]] = {"heads": ("kv_append",)}
SEPARATE: Final = "separate"
EAGER: Final = "eager"
GRAPH: Final = "graph"


class Cell(Struct, frozen=True):
    """How often an operator ran in one kind of step.

    Attributes:
        phase: kind of step.
        eager: runs that the trace shows.
        graph: steps in which a graph was replayed that holds it.
    """

    phase: StepKind
    eager: int
    graph: int


class Row(Struct, frozen=True):
    """One operator of one class of blocks.

    Attributes:
        layer_class: of the blocks, or "outside".
        operator: as `tercet plan` calls it.
        kernels: of the registry that ran for it; none: it is torch's own.
        native: what torch's profiler saw in it.
        cells: one for each phase.
    """

    layer_class: str
    operator: str
    kernels: list[str]
    native: list[str]
    cells: list[Cell]


class CoverageReport(Struct, frozen=True):
    """What an end-to-end run of the real server exercised.

    Attributes:
        model: the folder; layers: the choice of blocks.
        layer_map: source index of each runtime layer; blocks: of the checkpoint.
        rows: operators of the plan.
        steps: by kind; chunked: steps that computed a part of a prompt; replays: of graphs; captured: whether any was.
        kernels: the server's choices, with the reasons against the others; graphs: how steps of single tokens run.
        answers: what became of the requests.
        inspection: of the core's invariants after them.
        exit_status: of the server.
        not_run: operators with the phases they did not run in, and kernels that were chosen and never ran.
        failures: why the verdict is "fail"; empty: it is "pass".
        unverified: what these requests could not reach.
    """

    model: str
    layers: str
    layer_map: list[int]
    blocks: int
    rows: list[Row]
    steps: dict[str, int]
    chunked: int
    replays: int
    captured: bool
    kernels: list[KernelChoice]
    graphs: KernelChoice | None
    answers: list[Answered]
    inspection: Inspection
    exit_status: int
    not_run: list[str]
    failures: list[str]
    unverified: list[str]


class Visit(Struct, frozen=True):
    """What a run of the server left.

    Attributes:
        answers, inspection: of the requests.
        kernels, graphs: chosen.
        steps: of the profile.
        exit_status: of the server.
        longest: tokens of the longest sequence.
    """

    answers: list[Answered]
    inspection: Inspection
    kernels: list[KernelChoice]
    graphs: KernelChoice | None
    steps: list[StepProfile]
    exit_status: int
    longest: int


def read_profile(path: Path) -> list[StepProfile]:
    """The lines of a profile file.

    Raises:
        EngineFailed: it cannot be read, or holds something else.
    """
    try:
        return msgspec.json.Decoder(StepProfile).decode_lines(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineFailed(f"{path}: no profile: {error}") from error


def join(model: str, plan: Plan, visit: Visit) -> CoverageReport:
    """Judge a run of the server.

    Args:
        model: the folder.
        plan: that it served.
        visit: what it left.
    """
    rows = list(_rows(plan, visit.steps))
    kinds = [step.kind for step in visit.steps]
    not_run = [*_holes(rows), *_idle_kernels(rows, visit.kernels)]
    failures = [f"did not run: {each}" for each in not_run]
    failures += [f"request {answer.name}: {answer.finish}" for answer in visit.answers if not answer.passed]
    failures += [f"invariant of the core: {each}" for each in visit.inspection.violations]
    chunked = sum(step.chunked for step in visit.steps)
    if not chunked:
        failures.append("did not run: a prompt in chunks")
    if visit.exit_status:
        failures.append(f"the server ended with status {visit.exit_status}")
    return CoverageReport(
        model=model,
        layers=plan.layers,
        layer_map=list(plan.layer_map),
        blocks=plan.blocks,
        rows=rows,
        steps={kind: sum(each == kind for each in kinds) for kind in PHASES},
        chunked=chunked,
        replays=sum(step.graphs for step in visit.steps),
        captured=any(step.captured for step in visit.steps),
        kernels=visit.kernels,
        graphs=visit.graphs,
        answers=visit.answers,
        inspection=visit.inspection,
        exit_status=visit.exit_status,
        not_run=not_run,
        failures=failures,
        unverified=list(_unverified(plan, visit.longest)),
    )


def _rows(plan: Plan, steps: Sequence[StepProfile]) -> Iterator[Row]:
    runs: dict[tuple[str, str], list[tuple[StepProfile, OperatorRun]]] = defaultdict(list)
    for step in steps:
        for run in step.operators:
            runs[run.layer_class, run.operator].append((step, run))
    for layer_class, operator in expected(plan):
        found = runs[layer_class, operator]
        yield Row(
            layer_class=layer_class,
            operator=operator,
            kernels=sorted({run.kernel for _, run in found if run.kernel}),
            native=sorted({name for _, run in found for name in run.native}),
            cells=[_cell(phase, found, steps) for phase in PHASES],
        )


def expected(plan: Plan) -> list[tuple[str, str]]:
    """Class and name of every operator that the plan runs."""
    chosen = [each for each in plan.classes if each.chosen]
    inside = [(each.name, operator) for each in chosen for operator in each.operators]
    return [*inside, *((OUTSIDE, operator) for operator in plan.outer_operators)]


def _cell(phase: StepKind, runs: Iterable[tuple[StepProfile, OperatorRun]], steps: Iterable[StepProfile]) -> Cell:
    runs = list(runs)
    eager = sum(run.count for step, run in runs if step.kind == phase)
    # What a graph holds ran when it was captured, and runs unseen whenever it is replayed.
    held = any(step.captured for step, _ in runs)
    replays = sum(step.graphs > 0 for step in steps if step.kind == phase)
    return Cell(phase, eager, replays if held else 0)


def _holes(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        missing = [cell.phase for cell in row.cells if not cell.eager and not cell.graph]
        if missing:
            yield f"{row.layer_class}: {row.operator}: {', '.join(missing)}"


def _idle_kernels(rows: Sequence[Row], choices: Sequence[KernelChoice]) -> Iterator[str]:
    ran = {kernel for row in rows for kernel in row.kernels}
    done = {part for choice in choices if choice.chosen in ran for part in PARTS.get(choice.operator, ())}
    for choice in choices:
        separate = choice.operator in PARTS and choice.chosen == SEPARATE
        if choice.chosen not in ran and choice.operator not in done and not separate:
            yield f"kernel {choice.chosen} for {choice.operator} of {choice.problem}"


def _unverified(plan: Plan, longest: int) -> Iterator[str]:
    for each in plan.classes:
        window = longest_window([each.name])
        if each.chosen and window and longest <= window:
            yield f"{each.name}: the longest sequence has {longest} tokens, within the window of {window}"
    for name in plan.left_out:
        yield f"{name}: no block of this class runs"


def lines(report: CoverageReport) -> list[str]:
    """The report for people; the verdict is the last line."""
    width = max(len(f"{row.layer_class}  {row.operator}") for row in report.rows)
    steps = ", ".join(f"{count} {kind}" for kind, count in report.steps.items())
    text = [
        f"{report.model}, --layers {report.layers}: {len(report.layer_map)} of {report.blocks} blocks",
        f"steps: {steps}; {report.chunked} with a part of a prompt; {report.replays} graph replays",
        "",
        f"{'class  operator'.ljust(width)}  {'  '.join(phase.ljust(10) for phase in PHASES)}  kernel",
    ]
    for row in report.rows:
        cells = "  ".join(shown(cell).ljust(10) for cell in row.cells)
        text.append(f"{f'{row.layer_class}  {row.operator}'.ljust(width)}  {cells}  {', '.join(row.kernels)}".rstrip())
    text += ["", *(f"request {each.name}: {each.tokens} tokens, {each.finish}" for each in report.answers)]
    text += [f"unverified: {each}" for each in report.unverified]
    text += [f"failed: {each}" for each in report.failures]
    return [*text, f"verdict: {'fail' if report.failures else 'pass'}"]


def shown(cell: Cell) -> str:
    """How an operator ran in one kind of step."""
    counts = {EAGER: cell.eager, GRAPH: cell.graph}
    return " ".join(f"{count} {mode}" for mode, count in counts.items() if count) or "none"
