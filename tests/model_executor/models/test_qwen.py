"""Variants of config.json that mean the same or another Qwen, and those that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_core.wire.config import ModelOptions
from model_executor.errors import ConfigRefused
from model_executor.models.reader import read_spec
from tests.fixtures.families import VOCAB, edit_config, write_family
from tests.fixtures.reference import Reference
from tests.model_executor.engine import load

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(7).integers(1, VOCAB, 30).tolist()
NO_ROPE = {"rope_parameters": ...}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("qwen2") / "model", "qwen2")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("qwen3") / "model", "qwen3")


def variant(source: Path, target: Path, **fields: Any) -> Path:
    """A copy with these fields; ... removes one."""
    return edit_config(shutil.copytree(source, target / "model"), **fields)


def assert_parity(folder: Path) -> None:
    expected = Reference(folder).logits(PROMPT)
    assert expected.std() > 0.1
    assert np.abs(load(folder).logits(PROMPT) - expected).max() <= TOLERANCE


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ...},
        {"layer_types": ..., "max_window_layers": 0},
        {"layer_types": ..., "max_window_layers": ...},
        {"layer_types": ..., "use_sliding_window": False},
        {"layer_types": ..., "sliding_window": None},
        {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
        {"layer_types": ["full_attention"] * 6, "use_sliding_window": False, "sliding_window": None},
        {**NO_ROPE, "rope_theta": 700.0},
        {**NO_ROPE, "rope_theta": 700.0, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {**YARN, "rope_theta": 700.0}},
        {"head_dim": 8},
        {"dtype": ..., "torch_dtype": "float32"},
        {"use_mrope": False, "an_unknown_key": [1]},
    ],
    ids=str,
)
def test_qwen2_variants(qwen2: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    assert_parity(variant(qwen2, tmp_path, **fields))


def test_qwen2_null_is_absent(qwen2: Path, tmp_path: Path) -> None:
    folder = variant(qwen2, tmp_path, head_dim=None, pad_token_id=None, rope_scaling=None)
    assert read_spec(folder, ModelOptions()) == read_spec(qwen2, ModelOptions())


def test_qwen2_absent_kv_heads(tmp_path: Path) -> None:
    """transformers takes 32 for an absent key and all heads for null."""
    shape = {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 128, "num_hidden_layers": 2}
    folder = write_family(tmp_path / "model", "qwen2", layer_types=None, **shape)
    assert_parity(edit_config(folder, num_key_value_heads=...))
    assert (
        read_spec(edit_config(folder, num_key_value_heads=None), ModelOptions()).layers[0].attention.num_kv_heads == 32
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ..., "max_window_layers": 2},
        {"tie_word_embeddings": False},
        {**NO_ROPE, "rope_theta": 700.0},
        {"rms_norm_eps": 0.1},
        {"hidden_act": "gelu_pytorch_tanh"},
    ],
    ids=str,
)
def test_qwen3_variants(qwen3: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = variant(qwen3, tmp_path, **fields)
    if "tie_word_embeddings" in fields:
        folder = write_family(tmp_path / "untied", "qwen3", **fields)
    assert_parity(folder)


def test_qwen3_with_biases(tmp_path: Path) -> None:
    assert_parity(write_family(tmp_path / "model", "qwen3", attention_bias=True))


def test_qwen3_absent_head_dim(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "qwen3", head_dim=128)
    assert_parity(edit_config(folder, head_dim=...))


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types: .*5 entries for num_hidden_layers = 6"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types: .*7 entries for num_hidden_layers = 6"),
        ({"layer_types": ["full_attention", "linear_attention"] * 3}, "layer_types: .*linear_attention unknown"),
        ({"use_sliding_window": False}, "use_sliding_window: False"),
        ({"use_sliding_window": ...}, "use_sliding_window"),
        ({"sliding_window": None}, "sliding_window: None"),
        ({"sliding_window": 0}, "sliding_window: 0"),
        ({"layer_types": ..., "max_window_layers": -1}, "max_window_layers: -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3"),
        ({"mlp_bias": True}, "mlp_bias: True"),
        ({"num_experts": 4}, "num_experts: 4"),
        ({"use_mrope": True}, "use_mrope: True"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "rope_scaling.type: 'mrope'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_size": 30}, "num_attention_heads: 4"),
    ],
    ids=str,
)
def test_qwen2_refuses_by_name(qwen2: Path, tmp_path: Path, fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigRefused, match=culprit):
        read_spec(variant(qwen2, tmp_path, **fields), ModelOptions())
