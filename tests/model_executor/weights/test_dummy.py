from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from model_executor.weights import dummy as dummy_module
from tests.fixtures.llama import Shape, llama_config
from tests.model_executor.engine import draw

SIX = Shape(hidden=64, layers=6, heads=4, kv_heads=2, intermediate=96, vocab=128, attention_bias=True)
PROMPT = list(range(30))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds a config and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(llama_config(SIX)))
    return tmp_path


def test_a_block_is_the_same_in_every_choice(folder: Path) -> None:
    whole, chosen = draw(folder).model.state_dict(), draw(folder, [5, 2]).model.state_dict()
    for name, value in chosen.items():
        original = name.replace("blocks.0.", "blocks.5.").replace("blocks.1.", "blocks.2.")
        assert torch.equal(value, whole[original])


def test_blocks_differ_from_each_other_and_from_other_seeds(folder: Path) -> None:
    first, other = draw(folder).model.state_dict(), draw(folder, seed=1).model.state_dict()
    down = "blocks.{}.mlp.down.weight"
    assert not torch.equal(first[down.format(0)], first[down.format(1)])
    assert not torch.equal(first[down.format(0)], other[down.format(0)])
    assert torch.equal(first["norm.weight"], torch.ones(64))


def test_portions_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = draw(folder).model.state_dict()
    monkeypatch.setattr(dummy_module, "PORTION_BYTES", 1000)
    found = draw(folder).model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_are_finite_and_alive(folder: Path, dtype: torch.dtype) -> None:
    logits = draw(folder, dtype=dtype).logits(PROMPT)
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


def test_deep_models_stay_finite(tmp_path: Path) -> None:
    config = {**llama_config(SIX), "num_hidden_layers": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert np.isfinite(draw(tmp_path, dtype=torch.float16).logits(PROMPT)).all()


def test_report(folder: Path) -> None:
    report = draw(folder, [3], seed=7).report
    assert report.counts == {"generated": 3 + 2 + 4 + 2, "missing": 0, "unexpected": 0}
    assert report.layer_map == [3]
    assert (report.bytes_read, report.shards_opened, report.page_cache) == (0, [], None)
    assert report.bytes_materialized == sum(p.nbytes for p in draw(folder, [3]).model.parameters())
