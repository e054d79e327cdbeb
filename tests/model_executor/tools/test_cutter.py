"""A cut of every family: transformers and Tercet compute on it what they compute on the blocks that it holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from model_executor.errors import CheckpointBroken
from model_executor.tools.cutter import SHARD_BYTES, CutOptions, plan_cut, write_cut
from model_executor.tools.model import open_model
from model_executor.tools.plan import make_report
from model_executor.weights.cut_assets import RECORD
from model_executor.weights.inventory import files_of, take_stock
from tests.model_executor.engine import load
from tests.model_executor.tools.folders import KEPT, cut, in_transformers, spread, write_model

PROMPT = np.random.default_rng(7).integers(1, 96, 40).tolist()


@pytest.fixture(scope="module", params=KEPT)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(name) / "source", name)


@pytest.fixture(scope="module")
def out(name: str, source: Path) -> Path:
    return cut(source, source.parent / "out", KEPT[name])


def test_transformers_computes_the_same(name: str, source: Path, out: Path) -> None:
    both = in_transformers(source, out, KEPT[name], PROMPT)
    assert both.faults == []
    assert np.array_equal(both.cut, both.removed)


def test_tercet_computes_the_same(name: str, source: Path, out: Path) -> None:
    chosen, whole = load(source, KEPT[name]), load(out)
    assert np.array_equal(whole.logits(PROMPT), chosen.logits(PROMPT))
    assert whole.report.bytes_materialized == chosen.report.bytes_materialized
    assert list(whole.plan.classes) == list(chosen.plan.classes)


def test_each_block_is_its_source(name: str, source: Path, out: Path) -> None:
    before, after = open_model(source).spec, open_model(out).spec
    names = [before.layers[s].class_name for s in KEPT[name]]
    assert [layer.class_name for layer in after.layers] == names


def test_files_of_other_blocks_are_not_needed(name: str, source: Path, tmp_path: Path) -> None:
    """With one tensor in each file: the plan names the files, and without the others all goes on as before."""
    folder = spread(Path(shutil.copytree(source, tmp_path / "source")))
    layers = ",".join(map(str, KEPT[name]))
    made = make_report(open_model(folder), layers, allow_missing_classes=True)
    before = load(folder, KEPT[name])
    assert made.shards is not None
    assert made.shards.needed == tuple(before.report.shards_opened)
    assert made.shards.bytes_to_read == before.report.bytes_read
    assert made.memory_bytes["float32"] == before.report.bytes_materialized
    aside = tmp_path / "aside"
    aside.mkdir()
    for file in made.shards.not_needed:
        (folder / file).rename(aside / file)
    assert make_report(open_model(folder), layers, allow_missing_classes=True) == made
    after = load(folder, KEPT[name])
    assert np.array_equal(after.logits(PROMPT), before.logits(PROMPT))
    assert after.report.shards_skipped == list(made.shards.not_needed)
    # What belongs to a part that does not run is never read, but a cut takes it along.
    model = open_model(folder)
    assert model.checkpoint is not None
    parts = files_of(model.checkpoint, take_stock(model.spec, model.names, model.checkpoint).other_parts)
    assert bool(parts) == (name == "gemma3")
    for file in parts:
        (aside / file).rename(folder / file)
    again = cut(folder, tmp_path / "out", KEPT[name])
    assert np.array_equal(load(again).logits(PROMPT), before.logits(PROMPT))


def test_a_broken_record_of_the_source_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "llama")
    (source / RECORD).write_text("[]")
    options = CutOptions("0,5", "weights", "drop", allow_missing_classes=False, max_shard_bytes=SHARD_BYTES, command="")
    made = plan_cut(open_model(source), options)
    copied: list[int] = []
    with pytest.raises(CheckpointBroken, match="holds no JSON object"):
        write_cut(made, tmp_path / "out", copied.append)
    assert copied == []
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
