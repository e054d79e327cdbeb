"""The Markdown says what was found, and nothing that a part of a model does not allow to be said."""

from __future__ import annotations

import pytest
from msgspec import structs

from engine_core.wire.reports import KernelCandidate, KernelChoice
from frontend.proof import report as judged
from frontend.proof.report import BenchRow, Findings, Part, Report, SentinelPart, Speed
from frontend.proof.report_text import markdown
from tests.frontend.proof.examples import DENSE, WINDOWED, findings, identity, parity, plan

SECTIONS = (
    *("What this shows", "What this does not show", "Failures", "Unverified", "Environment", "Plan"),
    *("Checks before any timing counts", "Decisions", "Load", "Coverage", "Parity", "Sentinel"),
    *("Times of single places", "Load through HTTP", "Commands"),
)


def report(found: Findings) -> Report:
    parts = [Part("plan", ["tercet", "plan", "a folder"])]
    checks = judged.seven_checks(found)
    return Report(
        made="2026-01-01T00:00:00+00:00",
        model="m",
        blocks=f"{len(found.plan.layer_map)} of {found.plan.blocks} blocks",
        environment={"torch": "2"},
        parts=parts,
        checks=checks,
        findings=found,
        shows=judged.shows(found.plan),
        refused=judged.refused(found.plan),
        unverified=judged.unverified(found, parts),
        failures=judged.failures(found, parts, checks),
    )


def of_a_part() -> Findings:
    return structs.replace(findings(), bench=[BenchRow(1, 8, 128, None)])


def test_every_section_is_there_in_order() -> None:
    text = markdown(report(of_a_part()))
    assert [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS)
    assert "tercet plan 'a folder'" in text
    assert f"class {DENSE}: median of 1 blocks" in text
    assert f"block 1 <- 3 {WINDOWED}" in text
    assert "| attention | 4 heads | torch_sdpa | other: too narrow |" in text


def test_the_phases_of_the_start_say_what_they_are() -> None:
    text = markdown(report(findings()))
    assert "| start | 1.000 | processes and imports |" in text
    assert "| distributed init | - | none: one process computes, on one device |" in text


@pytest.mark.parametrize(
    ("waited", "words"), [(0.25, "waited for a processor 25% of the time"), (None, "does not tell how busy")]
)
def test_times_come_with_how_busy_the_machine_was(waited: float | None, words: str) -> None:
    found = findings()
    assert found.probe is not None
    text = markdown(report(structs.replace(found, probe=structs.replace(found.probe, waited=waited))))
    assert words in text
    assert "one sequence, on 2 threads" in text


def test_kernels_that_would_do_as_well_are_named() -> None:
    found = findings()
    assert found.coverage is not None
    also = KernelChoice("norm", "8", "fast", [KernelCandidate("fast", []), KernelCandidate("plain", [])])
    text = markdown(report(structs.replace(found, coverage=structs.replace(found.coverage, kernels=[also]))))
    assert "| norm | 8 | fast | plain: comes after it |" in text


def test_speed_is_printed_for_the_whole_model_alone() -> None:
    text = markdown(report(of_a_part()))
    assert "Speed is not printed: 2 of 6 blocks ran" in text
    assert "tokens/s" not in text
    everything = structs.replace(plan(), layer_map=tuple(range(6)))
    row = BenchRow(1, 8, 128, Speed(1.0, 1234.5, 2.0, 3.0, 4.0, 5.0))
    whole = markdown(report(structs.replace(findings(), plan=everything, bench=[row])))
    assert "1234.5" in whole
    assert "quality" not in whole


def test_no_time_is_multiplied() -> None:
    text = markdown(report(of_a_part()))
    times = {
        cell.strip() for line in text.splitlines() if line.startswith("| decode |") for cell in line.split("|")[6:9]
    }
    assert times == {"1.000", "2.000", "3.000"}


def test_the_numbers_that_were_compared_are_named() -> None:
    assert "LlamaForCausalLM r in float32: 8 sequences" in markdown(report(findings()))
    int8 = structs.replace(identity(), quantization="int8", kv_cache_dtype="float16")
    run, part = structs.replace(parity(), identity=int8), SentinelPart(int8, "a second run", 8, 20, [])
    text = markdown(report(structs.replace(findings(), parity=run, sentinel=part)))
    numbers = "float32 with products in int8, keys and values in float16"
    assert f"transformers 5, {numbers} against float64" in text
    assert f"LlamaForCausalLM r in {numbers}: 8 sequences" in text


@pytest.mark.parametrize("name", ["coverage", "load", "probe", "parity", "sentinel", "bench"])
def test_a_proof_that_did_not_run_says_so(name: str) -> None:
    assert markdown(report(structs.replace(of_a_part(), **{name: None}))).count("\nnot run") >= 1
