"""Programs are run to their end, and their errors are passed on with their meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_core.wire.evidence import ReferenceRun
from frontend.errors import StartRefused, UsageError
from frontend.proof.tools import PARITY, REFERENCE, read_plan, run_tool
from tests.model_executor.tools.folders import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", "gemma2")


def test_a_plan(folder: Path) -> None:
    plan = read_plan(folder, ["--layers", "0,1"])
    assert (plan.layer_map, plan.blocks, plan.layers) == ((0, 1), 6, "0,1")
    assert [each.chosen for each in plan.classes] == ["0", "1"]
    assert "sampling" in plan.outer_operators
    assert "attention" in plan.classes[0].operators


def test_a_report(folder: Path) -> None:
    run = run_tool(REFERENCE, [str(folder), "--layers", "0,1"], ReferenceRun)
    assert run.identity.layer_map == [0, 1]


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="layers"):
        read_plan(folder, ["--layers", "0,9"])
    with pytest.raises(UsageError, match="--nonsense"):
        run_tool(PARITY, [str(folder), "--nonsense"], ReferenceRun)
    with pytest.raises(StartRefused, match="nowhere"):
        read_plan(tmp_path / "nowhere", [])
