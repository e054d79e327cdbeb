"""All proofs of a choice of blocks, one after the other, and the report on them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct, structs

from engine_core.wire.evidence import ParityReport, ProbeReport
from frontend.errors import EngineFailed, FrontendError
from frontend.proof import report as judged
from frontend.proof.options import write_report, write_text
from frontend.proof.own_server import OwnServer
from frontend.proof.report import BenchRow, Findings, Part, Report, SentinelPart, Speed, every_block
from frontend.proof.report_text import markdown
from frontend.proof.run_coverage import Covered, cover
from frontend.proof.run_sentinel import observe, run_reference
from frontend.proof.sentinel import Sentinel, check_runs, differences, read_sentinel
from frontend.proof.surroundings import surroundings
from frontend.proof.tools import DEADLINE_S, PARITY, PROBE, Plan, read_plan, run_tool

T = TypeVar("T")

BENCH: Final = ("-m", "bench", "serve", "--json")
# Each number of clients several times.
BENCH_CLIENTS: Final = ("1", "1", "1", "4", "4", "4")
BENCH_INPUT: Final = 32
BENCH_OUTPUT: Final = 16


class Subject(Struct, frozen=True):
    """What is proven.

    Attributes:
        model: the folder.
        layers: flags that choose the blocks.
        precision: flags of dtype, quantization and KV cache.
        samples: of the parity.
        vocab: ids that the tokenizer knows.
        sentinel: a file to compare with; None: two runs are compared.
    """

    model: Path
    layers: list[str]
    precision: list[str]
    samples: int
    vocab: int
    sentinel: Path | None

    @property
    def words(self) -> list[str]:
        """The model and its flags, as every command takes them."""
        return [str(self.model), *self.layers, *self.precision]


class Reporter:
    """Runs the proofs; one that fails to run is noted and the next one goes on.

    Args:
        subject: what is proven.
        say: told what begins.
    """

    def __init__(self, subject: Subject, say: Callable[[str], None]) -> None:
        self._subject = subject
        self._say = say
        self._parts: list[Part] = []

    def run(self) -> Report:
        """Everything.

        Raises:
            StartError: there is no such plan.
        """
        subject = self._subject
        plan = read_plan(subject.model, subject.layers)
        self._parts.append(Part("plan", ["tercet", "plan", str(subject.model), *subject.layers]))
        vocab = ["--sample-vocab", str(subject.vocab)]
        covered = self._part(
            "coverage",
            ["tercet", "coverage", *subject.words],
            lambda: cover(subject.model, subject.layers, subject.precision, subject.vocab),
        )
        probed = self._part(
            "probe",
            ["python", "-m", PROBE, *subject.words, *vocab],
            lambda: run_tool(PROBE, [*subject.words, *vocab], ProbeReport),
        )
        samples = ["--samples", str(subject.samples)]
        parity = self._part(
            "parity",
            ["tercet", "parity", *subject.words, *samples, *vocab],
            lambda: run_tool(PARITY, [*subject.words, *samples, *vocab], ParityReport),
        )
        sentinel = self._part("sentinel", self._sentinel_command(), self._sentinel)
        ids = subject.vocab if covered is None else min(subject.vocab, covered.ready.model.vocab_size)
        bench = self._part("bench", bench_command("URL", ids), lambda: self._bench(plan, ids))
        return self._report(self._findings(plan, covered, probed, parity, sentinel, bench))

    def _part(self, name: str, command: list[str], act: Callable[[], T]) -> T | None:
        self._say(f"running: {name}")
        try:
            result = act()
        except FrontendError as error:
            self._parts.append(Part(name, command, str(error)))
            return None
        self._parts.append(Part(name, command))
        return result

    def _findings(
        self,
        plan: Plan,
        covered: Covered | None,
        probed: ProbeReport | None,
        parity: ParityReport | None,
        sentinel: SentinelPart | None,
        bench: list[BenchRow] | None,
    ) -> Findings:
        found = Findings(plan=plan, probe=probed, parity=parity, sentinel=sentinel, bench=bench)
        if covered is None:
            return found
        startup = {str(phase): seconds for phase, seconds in covered.ready.startup_s.items()}
        return structs.replace(found, coverage=covered.report, load=covered.ready.load, startup=startup)

    def _report(self, findings: Findings) -> Report:
        plan = findings.plan
        checks = judged.seven_checks(findings)
        return Report(
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            model=self._subject.model.name,
            blocks=f"{len(plan.layer_map)} of {plan.blocks} blocks",
            environment=surroundings(None if findings.probe is None else findings.probe.environment),
            parts=self._parts,
            checks=checks,
            findings=findings,
            shows=judged.shows(plan),
            refused=judged.refused(plan),
            unverified=judged.unverified(findings, self._parts),
            failures=judged.failures(findings, self._parts, checks),
        )

    def _sentinel_command(self) -> list[str]:
        file, action = (self._subject.sentinel, "check") if self._subject.sentinel else ("FILE", "record")
        return ["tercet", "sentinel", action, str(file), *self._subject.words]

    def _sentinel(self) -> SentinelPart:
        subject = self._subject
        if subject.sentinel is None:
            against, recorded = "a second run", self._observed()
        else:
            against, recorded = str(subject.sentinel), read_sentinel(subject.sentinel)
        now = self._observed()
        check_runs(recorded.reference, now.reference)
        return SentinelPart(
            identity=now.reference.identity,
            against=against,
            sequences=len(now.reference.sequences),
            weights=len(now.reference.weights),
            faults=differences(recorded, now),
        )

    def _observed(self) -> Sentinel:
        subject = self._subject
        flags = [*subject.layers, *subject.precision]
        return observe(subject.model, flags, run_reference(subject.model, flags), None)

    def _bench(self, plan: Plan, ids: int) -> list[BenchRow]:
        subject = self._subject
        with OwnServer(subject.model, [*subject.layers, *subject.precision]) as server:
            server.wait_ready()
            command = [sys.executable, *bench_command(server.url, ids)[1:]]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False
            )
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise EngineFailed(f"bench serve: {last[-1]}")
        rows = [bench_row(line, speed=every_block(plan)) for line in done.stdout.splitlines()]
        if not rows:
            raise EngineFailed("bench serve: no result")
        return rows


def bench_command(url: str, ids: int) -> list[str]:
    """The load, on a server; ids of prompts are below `ids`."""
    sizes = ["--random-input-len", str(BENCH_INPUT), "--random-output-len", str(BENCH_OUTPUT), "--vocab", str(ids)]
    return ["python", *BENCH, "--base-url", url, "--max-concurrency", *BENCH_CLIENTS, *sizes]


def bench_row(line: bytes, *, speed: bool) -> BenchRow:
    """A row from a line of bench/serve.py.

    Args:
        line: JSON.
        speed: whether how fast it was may be told.

    Raises:
        EngineFailed: the line is something else.
    """
    try:
        found = msgspec.json.decode(line, type=BenchLine)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"bench serve: {error}") from error
    times = (found.median_ttft_ms, found.p99_ttft_ms, found.median_itl_ms, found.p99_itl_ms)
    return BenchRow(
        found.max_concurrency,
        found.completed,
        found.total_output_tokens,
        Speed(found.duration, found.output_throughput, *times) if speed else None,
        found.failed,
    )


class BenchLine(Struct, frozen=True):
    """What is used of a line of bench/serve.py."""

    max_concurrency: int
    completed: int
    failed: int
    total_output_tokens: int
    duration: float
    output_throughput: float
    median_ttft_ms: float
    p99_ttft_ms: float
    median_itl_ms: float
    p99_itl_ms: float


def write(report: Report, out: Path, say: Callable[[str], None]) -> None:
    """Write report.md and report.json into a folder, which is made.

    Raises:
        UsageError: it cannot be written.
    """
    write_report(out / "report.json", report)
    write_text(out / "report.md", markdown(report))
    say(f"{out / 'report.md'}: {len(report.failures)} failures, {len(report.unverified)} points unverified")
