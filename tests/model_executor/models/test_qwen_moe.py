"""Which blocks of a Qwen 3 have experts, variants of its config.json, and those that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_core.wire.config import ModelOptions
from model_executor.errors import ConfigRefused, WeightsRefused
from model_executor.models.reader import read_spec
from tests.fixtures.expert_families import VOCAB, write_experts
from tests.fixtures.families import edit_config
from tests.fixtures.reference import Reference
from tests.model_executor.engine import load

PROMPT = np.random.default_rng(7).integers(0, VOCAB, 30).tolist()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks 1, 3 and 5 are dense."""
    folder = tmp_path_factory.mktemp("qwen") / "model"
    return write_experts(folder, "qwen3-moe", decoder_sparse_step=1, mlp_only_layers=[1, 3, 5])


@pytest.mark.parametrize(
    ("step", "listed", "sparse"),
    [
        (1, [], [0, 1, 2, 3, 4, 5]),
        (2, [], [1, 3, 5]),
        (2, [1, 4], [3, 5]),
        (3, None, [2, 5]),
        (7, [], []),
        (1, [0, 1, 2, 3, 4], [5]),
    ],
)
def test_blocks_with_experts(
    qwen: Path, tmp_path: Path, step: int, listed: list[int] | None, sparse: list[int]
) -> None:
    fields = {"decoder_sparse_step": step, "mlp_only_layers": listed}
    spec = read_spec(edit_config(shutil.copytree(qwen, tmp_path / "model"), **fields), ModelOptions())
    assert [layer.source for layer in spec.layers if layer.mlp.kind == "moe"] == sparse
    widths = {layer.mlp.kind: layer.mlp.intermediate_size for layer in spec.layers}
    assert set(widths.items()) <= {("moe", 12), ("gated", 40)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_topk_prob": False},
        {"norm_topk_prob": ...},
        {"num_experts_per_tok": 1},
        {"num_local_experts": ..., "num_experts": 10},
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3},
        {"use_sliding_window": False, "sliding_window": 6},
        {"rope_parameters": ..., "rope_theta": 300.0},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ],
    ids=str,
)
def test_variants_equal_the_reference(qwen: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = edit_config(shutil.copytree(qwen, tmp_path / "model"), **fields)
    expected = Reference(folder).logits(PROMPT)
    assert np.abs(load(folder).logits(PROMPT) - expected).max() <= 1e-4


def test_attention_bias(tmp_path: Path) -> None:
    folder = write_experts(tmp_path, "qwen3-moe", num_hidden_layers=2, attention_bias=True)
    assert np.abs(load(folder).logits(PROMPT) - Reference(folder).logits(PROMPT)).max() <= 1e-4


def test_a_block_of_the_other_kind_is_refused_by_name(qwen: Path, tmp_path: Path) -> None:
    folder = edit_config(shutil.copytree(qwen, tmp_path / "model"), mlp_only_layers=[1, 3])
    with pytest.raises(WeightsRefused, match=r"model\.layers\.5\.mlp\.experts\.0\.gate_proj\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp_only_layers": [1.5]}, "mlp_only_layers.*whole numbers"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: 0"),
        ({"num_experts_per_tok": 11}, "num_experts_per_tok: 11: at most 10"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"n_group": 2}, "n_group"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types: .* 7 entries for num_hidden_layers = 6"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(qwen: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = edit_config(shutil.copytree(qwen, tmp_path / "model"), **fields)
    with pytest.raises(ConfigRefused, match=message):
        read_spec(folder, ModelOptions())
