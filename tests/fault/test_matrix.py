"""The fault matrix: a representative part always, all of it among the slow tests.

`--fault-record FILE` keeps how each case went, as JSON and, beside it, as a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.fault.case import Case, all_cases
from tests.fault.matrix import run_case
from tests.fault.record import Record, table

# Each process, each fault and each phase.
ALWAYS = {
    "executor-stop-prefill",
    "executor-exit-recovering",
    "executor-version-idle",
    "core-kill-preempted",
    "core-term-draining",
    "frontend-kill-decode",
    "frontend-kill-loading",
    "frontend-garbage-idle",
}


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest) -> Iterator[list[Record]]:
    """How each case went; written where --fault-record says."""
    made: list[Record] = []
    yield made
    path = request.config.getoption("--fault-record")
    if path is not None:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(made)))
        Path(path).with_suffix(".md").write_text(table(made) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in ALWAYS else [pytest.mark.slow]) for case in all_cases()],
)
def test_nothing_is_lost_and_nothing_is_left(case: Case, chain_folder: Path, records: list[Record]) -> None:
    record = run_case(case, chain_folder)
    records.append(record)
    assert record.faults == []


def test_the_part_that_always_runs_touches_everything() -> None:
    names = {case.name for case in all_cases()}
    assert names >= ALWAYS
    assert {name.split("-")[0] for name in ALWAYS} == {"executor", "core", "frontend"}
    assert {name.split("-")[1] for name in ALWAYS} == {"kill", "stop", "term", "exit", "garbage", "version"}
    phases = {"idle", "loading", "prefill", "decode", "preempted", "recovering", "draining"}
    assert {name.split("-")[2] for name in ALWAYS} == phases
