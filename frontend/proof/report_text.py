"""A report as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from statistics import median

from engine_core.wire.evidence import Check, ParityReport, ProbeReport, Timing
from engine_core.wire.reports import LoadReport, page_cache_state
from frontend.proof.coverage import PHASES, CoverageReport, shown
from frontend.proof.report import BenchRow, Report, SentinelPart

NOTHING = "not run"
PHASES_OF_A_START = {
    "start": "processes and imports",
    "distributed init": "none: one process computes, on one device",
    "plan": "configuration, headers, what goes where",
    "build": "modules, and the choice of kernels",
    "load": "reading the checkpoint into them",
    "pack": "weights into the form that kernels read",
    "kv_cache": "room for the cache",
    "warm_up": "the first execution of a step",
    "capture": "graphs",
    "warm_run": "the same step once more",
}


def markdown(report: Report) -> str:
    """The whole report."""
    verdict = f"failures: {len(report.failures)}" if report.failures else "no failures"
    parts = [
        f"# {report.model}: {report.blocks}",
        f"Made {report.made}. Verdict: **{verdict}**.",
        _section("What this shows", _bullets(report.shows)),
        _section("What this does not show", _bullets(report.refused)),
        _section("Failures", _bullets(f"{each.kind}: {each.message}" for each in report.failures)),
        _section("Unverified", _bullets(report.unverified)),
        _section("Environment", _table(("what", "value"), report.environment.items())),
        _section("Plan", _plan(report)),
        _section("Checks before any timing counts", _checks(report.checks)),
        _section("Decisions", _decisions(report.findings.coverage)),
        _section("Load", _load(report.findings.load, report.findings.startup)),
        _section("Coverage", _coverage(report.findings.coverage)),
        _section("Parity", _parity(report.findings.parity)),
        _section("Sentinel", _sentinel(report.findings.sentinel)),
        _section("Times of single places", _timings(report.findings.probe, report.blocks)),
        _section("Load through HTTP", _bench(report.findings.bench, report.blocks)),
        _section("Commands", _commands(report)),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text or 'none'}"


def _bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def _plan(report: Report) -> str:
    plan = report.findings.plan
    rows = [(each.name, each.count, each.chosen or "none") for each in plan.classes]
    return f"{plan.architecture}, --layers {plan.layers}: {report.blocks}\n\n" + _table(
        ("class of blocks", "in the checkpoint", "chosen"), rows
    )


def _checks(checks: Iterable[Check]) -> str:
    rows = [
        (place, each.name, "pass" if each.passed else "fail", each.evidence) for place, each in enumerate(checks, 1)
    ]
    return _table(("", "check", "outcome", "evidence"), rows)


def _decisions(coverage: CoverageReport | None) -> str:
    if coverage is None:
        return NOTHING
    rows = []
    for choice in [*coverage.kernels, *([] if coverage.graphs is None else [coverage.graphs])]:
        others = [each for each in choice.candidates if each.name != choice.chosen]
        told = [f"{each.name}: {', '.join(each.reasons) or 'comes after it'}" for each in others]
        rows.append((choice.operator, choice.problem, choice.chosen, "; ".join(told) or "there is none"))
    return _table(("operator", "problem", "kernel", "why no other"), rows)


def _load(load: LoadReport | None, startup: dict[str, float]) -> str:
    if load is None:
        return NOTHING
    placed = enumerate(zip(load.layer_map, load.classes, strict=True))
    share = "" if load.page_cache is None else f" ({load.page_cache:.0%} of the bytes)"
    facts = [
        f"revision {load.revision}",
        f"files opened: {', '.join(load.shards_opened) or 'none'}; not needed: {len(load.shards_skipped)}",
        f"{load.bytes_read} bytes read, {load.bytes_materialized} in memory before kernels pack them",
        f"page cache: {page_cache_state(load.page_cache)}{share}",
        *(f"{count} tensors {state}" for state, count in load.counts.items()),
    ]
    blocks = _table(("runtime layer", "source block", "class"), ((i, source, name) for i, (source, name) in placed))
    phases = {**dict.fromkeys(PHASES_OF_A_START), **startup}
    times = _table(
        ("phase of the start", "seconds", "what"),
        (
            (name, "-" if spent is None else f"{spent:.3f}", PHASES_OF_A_START.get(name, ""))
            for name, spent in phases.items()
        ),
    )
    return "\n\n".join((_bullets(facts), blocks, times))


def _coverage(coverage: CoverageReport | None) -> str:
    if coverage is None:
        return NOTHING
    rows = [
        (row.layer_class, row.operator, *(shown(cell) for cell in row.cells), ", ".join(row.kernels) or "torch")
        for row in coverage.rows
    ]
    answers = [(each.name, each.prompt_len, each.tokens, each.finish) for each in coverage.answers]
    return "\n\n".join(
        (
            _table(("class", "operator", *PHASES, "kernel"), rows),
            _table(("request", "prompt", "answer", "end"), answers),
            "Did not run:\n\n" + (_bullets(coverage.not_run) or "nothing"),
        )
    )


def _parity(parity: ParityReport | None) -> str:
    if parity is None:
        return NOTHING
    rows = [
        (
            row.place,
            f"{row.run.relative:.2e}",
            f"{row.noise.relative:.2e}",
            f"{1 - row.run.cosine:.1e}",
            f"{row.run.largest:.2e}",
            f"{row.noise.largest:.2e}",
            "yes" if row.within else "NO",
        )
        for row in parity.boundaries
    ]
    titles = ("place", "relative L2", "noise", "1 - cosine", "largest", "noise", "within")
    differing = [
        f"{each.sample} token {each.position}: {each.chosen} for {each.expected}, leads {each.chosen_margin:.2e} and "
        f"{each.expected_margin:.2e}; first place outside the noise: {each.first_place or 'none'}"
        for each in parity.disagreements
    ]
    samples, verdict = len(parity.samples), "fail" if parity.failures else "pass"
    compared = f"{parity.reference}, {parity.identity.numbers} against {parity.wide}, pack {parity.pack}"
    tokens = f"Greedy tokens, teacher-forced: {parity.agreed} of {parity.positions} agree."
    return "\n\n".join(
        (
            f"{compared}, {samples} samples; verdict: {verdict}",
            _table(titles, rows),
            f"{tokens} Free-running samples: {parity.free_equal} of {samples} equal.",
            "Disagreements:\n\n" + (_bullets(differing) or "none"),
            "Rule:\n\n" + _bullets(parity.rule),
        )
    )


def _sentinel(part: SentinelPart | None) -> str:
    if part is None:
        return NOTHING
    outcome = _bullets(part.faults) or "nothing differs"
    plan = f"{part.identity.architecture} {part.identity.revision} in {part.identity.numbers}"
    return f"{plan}: {part.sequences} sequences and {part.weights} weights, against {part.against}: {outcome}"


def _timings(probe: ProbeReport | None, blocks: str) -> str:
    if probe is None:
        return NOTHING
    rows = [
        (t.kind, t.mode, t.place, t.tokens, t.context, _ms(t.median), _ms(t.low), _ms(t.high), t.runs)
        for t in [*probe.timings, *_by_class(probe.timings)]
    ]
    titles = ("step", "mode", "place", "tokens", "context", "median ms", "lowest", "highest", "runs")
    waited = "The system does not tell how busy the machine was."
    if probe.waited is not None:
        waited = (
            f"Somebody on this machine, these runs included, waited for a processor {probe.waited:.0%} of the time; "
            "where that is much, other work ran beside them, and they took longer than they need."
        )
    text = f"{blocks} ran, one sequence, on {probe.environment.threads} threads. No time here is multiplied by a depth."
    return f"{text} {waited}\n\n" + _table(titles, rows)


def _by_class(timings: Sequence[Timing]) -> list[Timing]:
    """Each class of blocks: the runs of its blocks that were timed, put together; none is scaled."""
    groups: dict[tuple[str, str], list[Timing]] = {}
    for timing in timings:
        if timing.place.startswith("block "):
            groups.setdefault((timing.place.rpartition(" ")[2], timing.kind), []).append(timing)
    return [
        Timing(
            place=f"class {name}: median of {len(group)} blocks",
            kind=group[0].kind,
            mode=group[0].mode,
            tokens=group[0].tokens,
            context=group[0].context,
            median=median(each.median for each in group),
            low=min(each.low for each in group),
            high=max(each.high for each in group),
            runs=sum(each.runs for each in group),
        )
        for (name, _), group in groups.items()
    ]


def _bench(rows: Sequence[BenchRow] | None, blocks: str) -> str:
    if rows is None:
        return NOTHING
    if any(row.speed is None for row in rows):
        done = [(row.clients, row.requests, row.output_tokens) for row in rows]
        text = f"Speed is not printed: {blocks} ran, and it would be taken for the model's."
        return f"{text}\n\n" + _table(("clients", "requests done", "output tokens"), done)
    titles = ("clients", "requests", "output tokens", "tokens/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99")
    cells = [
        (
            row.clients,
            row.requests,
            row.output_tokens,
            *(f"{value:.1f}" for value in (s.tokens_per_s, s.ttft_p50, s.ttft_p99, s.itl_p50, s.itl_p99)),
        )
        for row in rows
        if (s := row.speed) is not None
    ]
    return _table(titles, cells)


def _commands(report: Report) -> str:
    lines = "\n".join(shlex.join(part.command) for part in report.parts)
    return f"```sh\n{lines}\n```"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"
