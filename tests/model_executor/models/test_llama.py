"""Logits of the family against transformers on the same folder, float32, teacher-forced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures.llama import Shape
from tests.fixtures.reference import Reference, prompts
from tests.model_executor.engine import SMALL, load, write_small

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(5).integers(0, SMALL.vocab, 40).tolist()

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-scaled": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 0.8,
        "truncate": False,
    },
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.2, "mscale_all_dim": 0.7},
}


def assert_parity(folder: Path) -> None:
    """Tercet's logits are transformers' within TOLERANCE, and they are no constant."""
    expected = Reference(folder).logits(PROMPT)
    assert expected.std() > 0.1
    assert np.abs(load(folder).logits(PROMPT) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_llama_rope(tmp_path: Path, rope: dict[str, Any], style: str) -> None:
    if style == "rope_scaling":
        fields: dict[str, Any] = {"rope_scaling": rope, "rope_theta": 500.0}
    else:
        fields = {"rope_parameters": {**rope, "rope_theta": 500.0}, "rope_scaling": ..., "rope_theta": ...}
    assert_parity(write_small(tmp_path, **fields))


@pytest.mark.parametrize(
    "shape",
    [
        replace(SMALL, attention_bias=True),
        replace(SMALL, mlp_bias=True),
        replace(SMALL, attention_bias=True, mlp_bias=True, tied=True),
        replace(SMALL, head_dim=16),
        replace(SMALL, head_dim=4),
        replace(SMALL, kv_heads=1),
        replace(SMALL, kv_heads=4),
    ],
    ids=str,
)
def test_llama_shapes(tmp_path: Path, shape: Shape) -> None:
    assert_parity(write_small(tmp_path, shape))


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": None},
        {"head_dim": 8},
        {"torch_dtype": ..., "dtype": "float32"},
        {"torch_dtype": ...},
        {"sliding_window": None, "use_sliding_window": False},
        {"pad_token_id": None, "an_unknown_key": {"deep": [1]}},
        {"rope_scaling": {}},
        {"hidden_act": "gelu"},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"rms_norm_eps": 0.1},
        {"layer_types": ["full_attention", "full_attention"]},
    ],
    ids=str,
)
def test_llama_variants(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert_parity(write_small(tmp_path, **fields))


def test_llama_absent_kv_heads(tmp_path: Path) -> None:
    assert_parity(write_small(tmp_path, replace(SMALL, kv_heads=4), num_key_value_heads=...))


MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.mark.parametrize("fields", [{"sliding_window": 5}, {"sliding_window": None}, {}], ids=str)
def test_mistral(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert_parity(write_small(tmp_path, **MISTRAL, **fields))


def test_mistral_absent_kv_heads(tmp_path: Path) -> None:
    """transformers takes 8 for an absent key."""
    shape = replace(SMALL, heads=8, kv_heads=8)
    assert_parity(write_small(tmp_path, shape, **MISTRAL, num_key_value_heads=...))


def test_llama_in_chunks(tmp_path: Path) -> None:
    loaded = load(write_small(tmp_path, sliding_window=5, **MISTRAL))
    whole = loaded.logits(PROMPT)
    for chunk in (1, 4, 7):
        assert np.abs(loaded.logits(PROMPT, chunk=chunk) - whole).max() <= TOLERANCE


def test_written_by_transformers(tmp_path: Path) -> None:
    """A folder that transformers itself wrote, in its own style of config."""
    from transformers import AutoModelForCausalLM

    first = write_small(tmp_path / "first", rope_scaling=ROPES["llama3"])
    AutoModelForCausalLM.from_pretrained(first, dtype="float32").save_pretrained(tmp_path / "second")
    assert "rope_parameters" in (tmp_path / "second" / "config.json").read_text()
    assert np.abs(load(tmp_path / "second").logits(PROMPT) - load(first).logits(PROMPT)).max() <= TOLERANCE


def test_float16_and_bfloat16_run(tmp_path: Path) -> None:
    folder = write_small(tmp_path)
    exact = load(folder).logits(PROMPT)
    for dtype, bound in ((torch.float16, 0.02), (torch.bfloat16, 0.2)):
        assert np.abs(load(folder, dtype=dtype).logits(PROMPT) - exact).max() <= bound


@pytest.mark.real_model
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_default_model(default_model: Path, count: int) -> None:
    """Whole, and in chunks that end inside a block."""
    loaded = load(default_model)
    reference = Reference(default_model)
    for prompt in prompts(count, vocab=loaded.spec.vocab_size, seed=0, shortest=40, longest=120):
        expected = reference.logits(prompt)
        assert np.abs(loaded.logits(prompt) - expected).max() <= 1e-3
        assert np.abs(loaded.logits(prompt, chunk=33) - expected).max() <= 1e-3
