"""The report's checks, failures and claims."""

from __future__ import annotations

import pytest
from msgspec import structs

from engine_core.wire.evidence import Check
from engine_core.wire.reports import KernelChoice
from frontend.proof.report import (
    ORDER,
    Findings,
    Part,
    SentinelPart,
    every_block,
    failures,
    refused,
    seven_checks,
    shows,
    unverified,
)
from frontend.proof.tools import Plan
from tests.frontend.proof import examples
from tests.frontend.proof.examples import findings, plan

PARTS = [Part(name, ["tercet", name]) for name in ORDER]
GRAPHS = KernelChoice("decode_step", "p", "cuda_graph", [])


def whole() -> Plan:
    return structs.replace(plan(), layer_map=tuple(range(6)))


def outcomes(found: Findings) -> list[bool]:
    return [check.passed for check in seven_checks(found)]


def spoilt(part: str, **changes: object) -> Findings:
    return structs.replace(findings(), **{part: structs.replace(getattr(findings(), part), **changes)})


def test_all_seven_pass() -> None:
    assert outcomes(findings()) == [True] * 7
    assert failures(findings(), PARTS, seven_checks(findings())) == []


@pytest.mark.parametrize(
    ("part", "changes", "check"),
    [
        ("coverage", {"exit_status": 4}, 0),
        ("probe", {"checks": [Check("tensor shape and layout", False, "x"), *examples.probe().checks[1:]]}, 1),
        ("probe", {"checks": examples.probe().checks[:1] + examples.probe().checks[2:]}, 1),
        ("load", {"counts": {"missing": 1}}, 2),
        ("load", {"layer_map": [3, 0]}, 2),
        ("load", {"classes": ["a", "b"]}, 2),
        ("coverage", {"inspection": structs.replace(examples.visit().inspection, free=9)}, 3),
        ("probe", {"checks": [*examples.probe().checks[:4], Check("routing", False, "x")]}, 4),
        ("coverage", {"not_run": ["x"]}, 5),
        ("coverage", {"graphs": GRAPHS, "replays": 1}, 5),
        ("probe", {"timings": [structs.replace(examples.probe().timings[0], runs=2)]}, 6),
    ],
)
def test_each_check_fails_for_its_fault(part: str, changes: dict[str, object], check: int) -> None:
    found = spoilt(part, **changes)
    assert outcomes(found) == [index != check for index in range(7)]
    assert failures(found, PARTS, seven_checks(found)) != []


def test_graphs_that_were_replayed_again_and_again() -> None:
    assert outcomes(spoilt("coverage", graphs=GRAPHS, replays=2))[5]


def test_failures_have_classes() -> None:
    parity = structs.replace(examples.parity(), failures=["a block"])
    sentinel = SentinelPart(examples.identity(), "a file", 8, 20, ["a weight"])
    found = structs.replace(findings(), parity=parity, sentinel=sentinel)
    parts = [*PARTS[:-1], Part("bench", [], "no server")]
    kinds = {failure.kind for failure in failures(found, parts, seven_checks(found))}
    assert kinds == {"parity", "sentinel", "load"}


def test_runs_of_the_load_count_too() -> None:
    row = examples.findings().bench or []
    few = structs.replace(findings(), bench=row[:2])
    assert outcomes(few) == [index != 6 for index in range(7)]
    lost = structs.replace(findings(), bench=[*row[:2], structs.replace(row[2], failed=2)])
    assert [each.message for each in failures(lost, PARTS, seven_checks(lost))] == ["2 of 10 requests failed"]


@pytest.mark.parametrize(("waited", "words"), [(0.4, "for a processor 40% of"), (None, "does not tell how busy")])
def test_times_of_a_busy_machine_are_unverified(waited: float | None, words: str) -> None:
    assert not any(line.startswith("times") for line in unverified(findings(), PARTS))
    (line,) = [line for line in unverified(spoilt("probe", waited=waited), PARTS) if line.startswith("times")]
    assert words in line


def test_what_did_not_run_is_unverified_and_no_pass() -> None:
    bare = Findings(plan=plan())
    assert outcomes(bare) == [False] * 7
    text = unverified(bare, [Part("plan", []), Part("coverage", [], "no model")])
    assert text[0] == "coverage: not run: no model"
    assert [f"{name}: not run" for name in ("probe", "parity", "sentinel", "bench")] == text[1:5]
    assert text[5:] == ["speed beside another engine: tercet bench compare measures it"]


def test_claims_of_a_part_and_of_the_whole() -> None:
    assert not every_block(plan())
    assert every_block(whole())
    assert "2 of 6 blocks" in shows(plan())[0]
    assert not any("speed" in line for line in shows(plan()))
    assert any("speed" in line for line in shows(whole()))
    assert [line.split(":")[0] for line in refused(plan())] == [
        "times of one block times the depth",
        "speed, latency and memory of the whole model",
        "quality of the model's answers",
    ]
    assert len(refused(whole())) == 1
