"""The report on a choice of blocks: what was run, what it showed, and what it does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from engine_core.wire.evidence import Check, ParityReport, PlanIdentity, ProbeReport
from engine_core.wire.reports import LoadReport
from frontend.proof.coverage import CoverageReport
from frontend.proof.tools import Plan

FailureClass = Literal["start", "requests", "weights", "state", "numbers", "coverage", "parity", "sentinel", "load"]
FEWEST_RUNS: Final = 3
# Share of a time in which somebody waited for a processor, from which on that time says little.
BUSY: Final = 0.1
CUDA_GRAPH: Final = "cuda_graph"
ORDER: Final = ("plan", "coverage", "probe", "parity", "sentinel", "bench")


class Part(Struct, frozen=True):
    """One proof.

    Attributes:
        name: one of ORDER.
        command: that repeats it.
        problem: why it gave nothing; empty: it ran.
    """

    name: str
    command: list[str]
    problem: str = ""


class Failure(Struct, frozen=True):
    """Something that went wrong, by class; "load" is that of requests, see bench/serve.py."""

    kind: FailureClass
    message: str


class Speed(Struct, frozen=True):
    """How fast a run of the load was; times in milliseconds, rate in output tokens a second."""

    seconds: float
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


class BenchRow(Struct, frozen=True):
    """One run of the load.

    Attributes:
        clients, output_tokens: of the run; requests: that ended as asked; failed: all others.
        speed: None where not all blocks ran: it would be taken for the model's.
    """

    clients: int
    requests: int
    output_tokens: int
    speed: Speed | None
    failed: int = 0


class SentinelPart(Struct, frozen=True):
    """Two runs of the pack, or one against a file.

    Attributes:
        identity: of both runs.
        against: the file, or "a second run".
        sequences, weights: compared.
        faults: what differs.
    """

    identity: PlanIdentity
    against: str
    sequences: int
    weights: int
    faults: list[str]


class Findings(Struct, frozen=True):
    """What the proofs gave; None: that proof did not run.

    Attributes:
        plan: of the blocks.
        load: of the weights.
        startup: seconds by phase.
    """

    plan: Plan
    coverage: CoverageReport | None = None
    load: LoadReport | None = None
    startup: dict[str, float] = {}
    probe: ProbeReport | None = None
    parity: ParityReport | None = None
    sentinel: SentinelPart | None = None
    bench: list[BenchRow] | None = None


class Report(Struct, frozen=True):
    """The whole report, as it stands in report.json.

    Attributes:
        made: date and time, UTC.
        model: the folder; blocks: "N of M blocks".
        environment: versions, machine, commit, lock.
        parts: proofs with their commands.
        checks: the seven that come before any timing counts.
        findings: of the proofs.
        shows, refused: what may be said, and what is not said, with the reason.
        unverified: what was not run or not reached.
        failures: by class; empty: none.
    """

    made: str
    model: str
    blocks: str
    environment: dict[str, str]
    parts: list[Part]
    checks: list[Check]
    findings: Findings
    shows: list[str]
    refused: list[str]
    unverified: list[str]
    failures: list[Failure]


def every_block(plan: Plan) -> bool:
    """Whether the plan holds all blocks, so that its answers and its speed are those of the model."""
    return len(plan.layer_map) == plan.blocks


def seven_checks(findings: Findings) -> list[Check]:
    """The checks that come before any timing counts, each with its evidence."""
    return [
        _life(findings),
        _from_probe(findings, "tensor shape, layout, aliasing, ownership", ("tensor shape and", "aliasing")),
        _mapping(findings),
        _runtime_state(findings),
        _from_probe(findings, "finite outputs and routing invariants", ("finite outputs", "routing")),
        _backends(findings),
        _several_runs(findings),
    ]


def _life(findings: Findings) -> Check:
    name = "normal start, readiness, request, sampling, teardown"
    report = findings.coverage
    if report is None:
        return _not_run(name)
    passed = sum(answer.passed for answer in report.answers)
    good = passed == len(report.answers) and report.exit_status == 0 and not report.inspection.violations
    evidence = f"{passed} of {len(report.answers)} requests of every kind of sampling ended as asked; "
    return Check(name, good, evidence + f"the server ended with status {report.exit_status}")


def _from_probe(findings: Findings, name: str, wanted: Sequence[str]) -> Check:
    if findings.probe is None:
        return _not_run(name)
    found = [check for check in findings.probe.checks if check.name.startswith(tuple(wanted))]
    evidence = "; ".join(f"{check.name}: {check.evidence}" for check in found)
    return Check(name, len(found) == len(wanted) and all(check.passed for check in found), evidence)


def _mapping(findings: Findings) -> Check:
    name = "complete weight and metadata mapping"
    load, plan = findings.load, findings.plan
    if load is None:
        return _not_run(name)
    kinds = {source: each.name for each in plan.classes for source in _listed(each.chosen)}
    mapped = load.layer_map == list(plan.layer_map) and load.classes == [kinds[source] for source in load.layer_map]
    missing, unexpected = load.counts.get("missing", 0), load.counts.get("unexpected", 0)
    counts = ", ".join(f"{count} {state}" for state, count in load.counts.items())
    evidence = f"tensors: {counts}; source of each runtime layer: {load.layer_map}"
    return Check(name, mapped and not missing and not unexpected, evidence)


def _listed(text: str) -> Iterator[int]:
    """The indices of a text such as "0,3,7-9"."""
    for item in filter(None, text.split(",")):
        first, _, last = item.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _runtime_state(findings: Findings) -> Check:
    name = "right-sized runtime state"
    probe = _from_probe(findings, name, ("right-sized",))
    if findings.coverage is None:
        return _not_run(name)
    ledger = findings.coverage.inspection
    balanced = ledger.free + ledger.cached + ledger.owned == ledger.total and not ledger.owned
    evidence = f"{probe.evidence}; blocks after all requests: {ledger.free} free, {ledger.cached} cached, "
    return Check(name, probe.passed and balanced, evidence + f"{ledger.owned} owned of {ledger.total}")


def _backends(findings: Findings) -> Check:
    name = "backend and fallback chosen, graph replayed repeatedly"
    report = findings.coverage
    if report is None:
        return _not_run(name)
    chosen = "; ".join(sorted({f"{choice.operator}: {choice.chosen}" for choice in report.kernels}))
    mode = "as they are" if report.graphs is None else report.graphs.chosen
    good = not report.not_run and (mode != CUDA_GRAPH or report.replays > 1)
    return Check(name, good, f"{chosen}; steps of single tokens: {mode}, {report.replays} graph replays")


def _several_runs(findings: Findings) -> Check:
    name = "several runs after warm-up"
    if findings.probe is None:
        return _not_run(name)
    fewest = min((timing.runs for timing in findings.probe.timings), default=0)
    loads = len(findings.bench or ())
    evidence = f"{fewest} runs of each timed place, {loads} runs of the load, each after a warm-up"
    return Check(name, min(fewest, loads) >= FEWEST_RUNS, evidence)


def _not_run(name: str) -> Check:
    return Check(name, passed=False, evidence="not run")


def failures(findings: Findings, parts: Sequence[Part], checks: Sequence[Check]) -> list[Failure]:
    """All that went wrong, by class."""
    found = [Failure(PART_CLASSES[part.name], f"{part.name}: {part.problem}") for part in parts if part.problem]
    found += [Failure(kind, f"{check.name}: {check.evidence}") for kind, check in _failed(checks)]
    if findings.coverage is not None:
        answers = [answer for answer in findings.coverage.answers if not answer.passed]
        found += [Failure("requests", f"{answer.name}: {answer.finish}") for answer in answers]
        found += [Failure("coverage", f"did not run: {each}") for each in findings.coverage.not_run]
    if findings.parity is not None:
        found += [Failure("parity", each) for each in findings.parity.failures]
    for row in findings.bench or ():
        if row.failed:
            found.append(Failure("load", f"{row.failed} of {row.failed + row.requests} requests failed"))
    if findings.sentinel is not None:
        found += [Failure("sentinel", each) for each in findings.sentinel.faults]
    return found


PART_CLASSES: Final[Mapping[str, FailureClass]] = {
    "plan": "start",
    "coverage": "start",
    "probe": "start",
    "parity": "parity",
    "sentinel": "sentinel",
    "bench": "load",
}
CHECK_CLASSES: Final[tuple[FailureClass, ...]] = ("start", "state", "weights", "state", "numbers", "coverage", "load")


def _failed(checks: Sequence[Check]) -> Iterator[tuple[FailureClass, Check]]:
    for kind, check in zip(CHECK_CLASSES, checks, strict=True):
        if not check.passed and check.evidence != "not run":
            yield kind, check


def unverified(findings: Findings, parts: Sequence[Part]) -> list[str]:
    """What was not run or not reached."""
    text = [f"{part.name}: not run: {part.problem}" for part in parts if part.problem]
    done = {part.name for part in parts}
    text += [f"{name}: not run" for name in ORDER if name not in done]
    if findings.coverage is not None:
        text += [f"coverage: {each}" for each in findings.coverage.unverified]
        if not findings.coverage.captured:
            text.append("graphs: none was captured on this device")
    if findings.parity is not None:
        text += [f"parity: {each}" for each in findings.parity.unverified]
    if findings.probe is not None and (waited := findings.probe.waited or 0.0) > BUSY:
        text.append(f"times: somebody waited for a processor {waited:.0%} of the time they were taken in; see there")
    if findings.probe is not None and findings.probe.waited is None:
        text.append("times: the system does not tell how busy the machine was")
    text += [f"blocks of class {name}: none runs" for name in findings.plan.left_out]
    text.append("speed beside another engine: tercet bench compare measures it")
    return text


def shows(plan: Plan) -> list[str]:
    """What may be said."""
    count = f"{len(plan.layer_map)} of {plan.blocks} blocks"
    text = [f"evidence at the level of single blocks, for {count} with the model's own embedding, final norm and head"]
    if every_block(plan):
        text.append("speed under the load below, on this machine")
    return text


def refused(plan: Plan) -> list[str]:
    """What is not said, and why."""
    text = ["times of one block times the depth: classes, shapes, routing and kernels differ between blocks"]
    if not every_block(plan):
        count = f"{len(plan.layer_map)} of {plan.blocks} blocks ran"
        text.append(f"speed, latency and memory of the whole model: {count}, and embedding and head weigh more here")
        text.append(f"quality of the model's answers: {count}, whose output is not the model's")
    return text
