"""Where each tensor belongs, by its name alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_core.wire.config import ModelOptions
from model_executor.errors import WeightsRefused
from model_executor.models.llama import NAMES
from model_executor.models.reader import read_spec
from model_executor.weights.index import Checkpoint
from model_executor.weights.inventory import BlockPrefix, Inventory, files_of, take_stock
from tests.fixtures.llama import parameter_shapes
from tests.model_executor.engine import SIX, write_small

ONES = np.ones(4, np.float32)


def stock(folder: Path) -> Inventory:
    return take_stock(read_spec(folder, ModelOptions()), NAMES, Checkpoint.open(folder))


def test_every_tensor_has_one_place(tmp_path: Path) -> None:
    extra = {
        "model.layers.6.eh_proj.weight": ONES,
        "model.rotary_emb.inv_freq": ONES,
        "model.layers.3.mlp.up_proj.weight_scale": ONES,
        "lm_head.weight_scale": ONES,
    }
    folder = write_small(tmp_path, SIX, tensors=extra, num_nextn_predict_layers=1)
    found = stock(folder)
    assert found.outer == ("lm_head.weight", "lm_head.weight_scale", "model.embed_tokens.weight", "model.norm.weight")
    assert list(found.blocks) == [0, 1, 2, 3, 4, 5]
    assert len(found.blocks[2]) == 9
    assert "model.layers.3.mlp.up_proj.weight_scale" in found.blocks[3]
    assert found.prediction == {0: ("model.layers.6.eh_proj.weight",)}
    assert list(found.ignored) == ["model.rotary_emb.inv_freq"]
    names = [*found.outer, *found.ignored, *(name for group in found.blocks.values() for name in group)]
    assert sorted([*names, *found.prediction[0]]) == sorted(Checkpoint.open(folder).files)
    assert found.of([5, 0]) == found.outer + found.blocks[5] + found.blocks[0]


def test_files_of_tensors(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX, shards=len(parameter_shapes(SIX)))
    checkpoint = Checkpoint.open(folder)
    found = take_stock(read_spec(folder, ModelOptions()), NAMES, checkpoint)
    files = files_of(checkpoint, found.of([1]))
    assert len(files) == 9 + len(found.outer)
    assert checkpoint.opened == []


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        ({"model.layers.6.x.weight": ONES}, {}, "1 unexpected: model.layers.6.x.weight"),
        ({"model.layers.7.x.weight": ONES}, {"num_nextn_predict_layers": 1}, "1 unexpected: model.layers.7.x.weight"),
        ({}, {"num_hidden_layers": 8}, r"2 missing: model.layers.6.\*, model.layers.7.\*"),
        ({"model.embed_tokens.weight": None}, {}, "1 missing: model.embed_tokens.weight"),
    ],
)
def test_what_is_refused(tmp_path: Path, tensors: dict[str, object], fields: dict[str, int], message: str) -> None:
    with pytest.raises(WeightsRefused, match=message):
        stock(write_small(tmp_path, SIX, tensors=tensors, **fields))  # type: ignore[arg-type]


def test_a_tied_pair_may_be_saved_as_the_head(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX, tensors={"model.embed_tokens.weight": None}, tie_word_embeddings=True)
    assert "lm_head.weight" in stock(folder).outer


def test_prefix() -> None:
    prefix = BlockPrefix(NAMES)
    assert prefix.index("model.layers.12.mlp.up_proj.weight") == 12
    assert prefix.moved("model.layers.12.mlp.layers.3.weight", 2) == "model.layers.2.mlp.layers.3.weight"
    for name in ("model.norm.weight", "model.layers.01.x", "model.layers.1", "xmodel.layers.1.x", "model.layersX1.x"):
        assert prefix.index(name) is None
