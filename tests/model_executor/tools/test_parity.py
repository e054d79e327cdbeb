"""Parity passes for what is right, and fails for a fault, naming the first block that has it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from engine_core.wire.evidence import ParityReport
from model_executor.errors import ToolMisused
from model_executor.tools import parity
from model_executor.tools.offline import Offline
from tests.fixtures.llama import Shape, write_rand
from tests.model_executor.tools.folders import spread, write_model

FAMILIES = ("llama", "gemma3_text", "qwen3-moe", "deepseek-v3")


def always(*names: str) -> pytest.MarkDecorator:
    """Every family; all but these among the slow tests."""
    marks = {name: () if name in names else (pytest.mark.slow,) for name in FAMILIES}
    params = [pytest.param(name, marks=marks[name]) for name in FAMILIES]
    return pytest.mark.parametrize("folder", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of every product are whole groups, as int8 needs them."""
    shape = Shape(hidden=64, layers=3, intermediate=128)
    return write_rand(tmp_path_factory.mktemp("wide") / "model", shape=shape)


def run(folder: Path, path: Path, *flags: str) -> tuple[int, ParityReport]:
    status = parity.main([str(folder), "--samples", "4", "--json", str(path), *flags])
    return status, msgspec.json.decode(path.read_bytes(), type=ParityReport)


def check(report: ParityReport) -> None:
    assert report.failures == []
    assert report.finite
    assert len(report.boundaries) == len(report.identity.layer_map) + 3
    # Were the noise as large as the values, the comparison would say nothing.
    assert all(row.noise.relative < 0.2 for row in report.boundaries)


@always("llama", "deepseek-v3")
def test_families_pass(folder: Path, tmp_path: Path) -> None:
    status, report = run(folder, tmp_path / "parity.json")
    check(report)
    assert status == 0
    assert report.wide == "float64"
    assert report.identity.layer_map == list(range(6))
    assert report.agreed == report.positions == 4 * parity.COUNT
    assert report.free_equal == 4
    assert max(row.run.relative for row in report.boundaries) < 1e-5


@always("gemma3_text", "qwen3-moe")
def test_some_blocks_of_families_pass_in_a_narrow_dtype(folder: Path, tmp_path: Path) -> None:
    """Logits of random blocks are near ties, so the rate of equal tokens does not decide here."""
    flags = ("--layers", "2,5", "--allow-missing-classes", "--dtype", "bfloat16")
    status, report = run(folder, tmp_path / "parity.json", *flags)
    check(report)
    assert status == 0
    assert report.wide == "float32"
    assert report.identity.layer_map == [2, 5]
    assert min(row.run.relative for row in report.boundaries[1:]) > 1e-4


def test_the_rate_decides_where_all_blocks_run(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "AGREEMENT", 1.01)
    status, report = run(llama, tmp_path / "parity.json")
    assert (status, report.failures) == (1, ["96 of 96 tokens agree, less than 101%"])
    status, report = run(llama, tmp_path / "parity.json", "--layers", "2,5")
    assert (status, report.failures) == (0, [])


@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_fault_of_one_block_is_found_there(
    llama: Path, tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **named: object) -> Offline:
        offline = Offline(*arguments, **named)  # type: ignore[arg-type]  # passed on as they came
        with torch.no_grad():
            offline.executor.model.blocks[block].get_parameter("mlp_norm.weight").mul_(1.5)
        return offline

    monkeypatch.setattr(parity, "Offline", broken)
    status, report = run(llama, tmp_path / "parity.json")
    assert status == 1
    within = [row.within for row in report.boundaries]
    assert within == [index <= block for index in range(len(within))]
    assert report.failures[0].startswith(f"block {block} <- {block} ")
    assert report.agreed < report.positions
    assert {each.first_place for each in report.disagreements} == {report.boundaries[block + 1].place}
    assert any(first is not None for first in report.free_first)


NARROWED = (
    ("--quantization", "int8"),
    ("--kv-cache-dtype", "float16"),
    ("--dtype", "float16", "--kv-cache-dtype", "bfloat16"),
    ("--quantization", "int8", "--dtype", "bfloat16", "--kv-cache-dtype", "float32"),
)


@pytest.mark.parametrize("flags", NARROWED, ids=" ".join)
def test_narrower_products_and_caches_pass(wide: Path, tmp_path: Path, flags: Sequence[str]) -> None:
    """The noise is theirs: far above that of the dtype."""
    status, report = run(wide, tmp_path / "parity.json", *flags)
    check(report)
    assert status == 0
    assert report.identity.quantization == ("int8" if "int8" in flags else "none")
    assert report.identity.narrowed
    assert all(row.noise.relative > 1e-5 for row in report.boundaries[1:])
    assert any("in int8" in kernel for kernel in report.environment.kernels) == ("int8" in flags)


def test_a_fault_beside_products_in_int8_is_found(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **named: object) -> Offline:
        offline = Offline(*arguments, **named)  # type: ignore[arg-type]  # passed on as they came
        if len(arguments) == 1:  # production, not the reference kernels
            with torch.no_grad():
                offline.executor.model.blocks[1].get_parameter("mlp_norm.weight").mul_(1.2)
        return offline

    monkeypatch.setattr(parity, "Offline", broken)
    status, report = run(wide, tmp_path / "parity.json", "--quantization", "int8")
    assert status == 1
    assert [row.within for row in report.boundaries[:3]] == [True, True, False]


def test_a_small_fault_below_the_tokens_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of one norm's scale: the tokens do not tell, the errors do."""

    def broken(*arguments: object, **named: object) -> Offline:
        offline = Offline(*arguments, **named)  # type: ignore[arg-type]  # passed on as they came
        with torch.no_grad():
            offline.executor.model.blocks[2].get_parameter("mlp_norm.weight").mul_(1.0001)
        return offline

    monkeypatch.setattr(parity, "Offline", broken)
    status, report = run(llama, tmp_path / "parity.json")
    assert status == 1
    assert report.agreed == report.positions
    assert [row.within for row in report.boundaries[:3]] == [True, True, True]
    assert not report.boundaries[3].within


def test_the_program_prints_the_rule_and_the_verdict(
    llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, report = run(llama, tmp_path / "parity.json")
    text = capsys.readouterr().out
    assert status == 0
    assert all(f"rule: {line}" in text for line in report.rule)
    assert text.splitlines()[-1] == "verdict: pass"
    assert json.loads((tmp_path / "parity.json").read_text())["reference"].startswith("transformers ")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_files_of_other_blocks_are_not_needed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = spread(write_model(tmp_path / "model", name))
    layers = ("--layers", "2,5", "--allow-missing-classes")
    others = [f"layers.{block}." for block in (0, 1, 3, 4)]
    listed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    gone = [file for tensor, file in listed.items() if "vision" not in tensor and any(o in tensor for o in others)]
    assert len(gone) > 30
    for file in gone:
        (folder / file).unlink()
    status, report = run(folder, tmp_path / "parity.json", *layers)
    check(report)
    assert status == 0
    assert report.identity.layer_map == [2, 5]
    assert parity.main([str(folder)]) == 3
    assert "No such file" in capsys.readouterr().err


def test_a_disk_without_room_for_the_cut_is_named(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(llama)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with (
        pytest.raises(ToolMisused, match=r"TMPDIR: .*and 1000 are free there"),
        parity.reference_folder(llama, "0,3", allow_missing_classes=False),
    ):
        pytest.fail("there is no room")


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--tolerance", "1"), 2, "--tolerance"),
        (("--samples", "0"), 2, "--samples"),
        (("--layers", "9"), 3, "layers"),
    ],
)
def test_refusals(
    llama: Path, capsys: pytest.CaptureFixture[str], flags: Sequence[str], status: int, message: str
) -> None:
    assert parity.main([str(llama), *flags]) == status
    assert message in capsys.readouterr().err


def test_a_window_that_no_sample_passes_is_unverified(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "gemma2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 100}))
    _, report = run(folder, tmp_path / "parity.json", "--layers", "0,1")
    assert report.unverified == ["sliding windows of 100 tokens: the longest sequence has 39"]


def test_without_transformers_the_program_says_so(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert parity.main([str(llama)]) == 2
    assert "transformers is not installed" in capsys.readouterr().err


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("layers", ["full", "first:1", "0,7,29"])
def test_the_default_model(default_model: Path, tmp_path: Path, layers: str) -> None:
    status, report = run(default_model, tmp_path / "parity.json", "--layers", layers)
    assert (status, report.failures) == (0, [])
    assert report.agreed >= 0.99 * report.positions
