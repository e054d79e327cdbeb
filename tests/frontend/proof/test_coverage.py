"""The join of plan, trace and choice of kernels finds every hole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from engine_core.wire.client import Inspection
from engine_core.wire.evidence import OUTSIDE, OperatorRun, StepProfile
from engine_core.wire.reports import KernelCandidate, KernelChoice
from frontend.errors import EngineFailed
from frontend.proof.coverage import CoverageReport, Visit, join, lines, read_profile, shown
from frontend.proof.requests import Answered
from frontend.proof.tools import Plan
from tests.frontend.proof.examples import DENSE, WINDOWED, plan, step, visit


def spoilt(**changes: object) -> CoverageReport:
    left: Visit = structs.replace(visit(), **changes)
    return join("m", plan(), left)


def test_all_ran() -> None:
    report = spoilt()
    assert (report.failures, report.not_run, report.unverified) == ([], [], [])
    assert [(row.layer_class, row.operator) for row in report.rows] == [
        (DENSE, "attention"),
        (WINDOWED, "attention"),
        (OUTSIDE, "embedding"),
        (OUTSIDE, "sampling"),
    ]
    assert report.steps == {"prefill": 1, "decode": 1, "mixed": 1}
    assert lines(report)[-1] == "verdict: pass"
    assert msgspec.json.decode(msgspec.json.encode(report), type=CoverageReport) == report


def test_a_kind_of_step_that_did_not_come_is_a_hole_of_every_operator() -> None:
    report = spoilt(steps=[step("prefill"), step("decode")])
    assert report.not_run == [f"{row.layer_class}: {row.operator}: mixed" for row in report.rows]
    assert lines(report)[-1] == "verdict: fail"


def test_the_warm_up_does_not_count() -> None:
    assert len(spoilt(steps=[step("warm_up", 0)]).not_run) == 4


def test_one_operator_of_one_class_that_did_not_run() -> None:
    steps = visit().steps
    steps = [
        structs.replace(each, operators=[run for run in each.operators if run.layer_class != WINDOWED])
        for each in steps
    ]
    assert spoilt(steps=steps).not_run == [f"{WINDOWED}: attention: prefill, decode, mixed"]


def test_a_kernel_that_was_chosen_and_never_ran() -> None:
    choice = structs.replace(visit().kernels[0], chosen="another")
    assert spoilt(kernels=[choice]).not_run == ["kernel another for attention of 4 heads"]


def heads(chosen: str) -> KernelChoice:
    return KernelChoice("heads", "4 heads", chosen, [KernelCandidate("separate", [])])


APPEND = KernelChoice("kv_append", "4 heads", "index_copy", [KernelCandidate("index_copy", [])])


def with_kernel(name: str, operator: str = "kv_append") -> list[StepProfile]:
    run = OperatorRun(DENSE, operator, name, 1, 10, 0, [])
    return [structs.replace(each, operators=[*each.operators, run]) for each in visit().steps]


def appending() -> Plan:
    dense, windowed = plan().classes
    return structs.replace(plan(), classes=(structs.replace(dense, operators=("attention", "kv_append")), windowed))


@pytest.mark.parametrize(
    ("ran", "chosen", "not_run"),
    [
        ("fused", "fused", []),
        ("index_copy", "separate", []),
        ("fused", "separate", ["kernel index_copy for kv_append of 4 heads"]),
        ("index_copy", "fused", ["kernel fused for heads of 4 heads"]),
    ],
)
def test_a_kernel_for_several_operators_or_one_for_each(ran: str, chosen: str, not_run: list[str]) -> None:
    left = structs.replace(visit(), kernels=[*visit().kernels, APPEND, heads(chosen)], steps=with_kernel(ran))
    assert join("m", appending(), left).not_run == not_run


def test_replays_count_for_what_was_captured() -> None:
    eager = [step("prefill"), step("mixed")]
    replayed = step("decode", 4, graphs=1, seen=False)
    captured = step("warm_up", 0, captured=True)
    assert spoilt(steps=[*eager, replayed]).not_run != []
    report = spoilt(steps=[captured, *eager, replayed, replayed])
    assert report.not_run == []
    assert [shown(cell) for cell in report.rows[0].cells] == ["1 eager", "2 graph", "1 eager"]
    assert report.replays == 2


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"exit_status": 4}, "the server ended with status 4"),
        ({"answers": [Answered("greedy", 8, 1, "stop", 0, False)]}, "request greedy: stop"),
        ({"inspection": Inspection(1, 1, 0, 0, 12, ["a block is lost"])}, "invariant of the core: a block is lost"),
        (
            {"steps": [structs.replace(each, chunked=False) for each in visit().steps]},
            "did not run: a prompt in chunks",
        ),
    ],
)
def test_other_faults(changes: dict[str, object], failure: str) -> None:
    assert failure in spoilt(**changes).failures


def test_what_requests_cannot_reach_is_unverified() -> None:
    report = join("m", structs.replace(plan(), left_out=("moe",)), structs.replace(visit(), longest=5))
    assert report.failures == []
    assert report.unverified == [
        f"{WINDOWED}: the longest sequence has 5 tokens, within the window of 5",
        "moe: no block of this class runs",
    ]


def test_a_profile_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in visit().steps))
    assert read_profile(path) == visit().steps
    path.write_bytes(b"{}\n")
    with pytest.raises(EngineFailed, match="no profile"):
        read_profile(path)
    with pytest.raises(EngineFailed, match="no profile"):
        read_profile(tmp_path / "nowhere")
