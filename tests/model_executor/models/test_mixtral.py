"""Variants of a Mixtral config.json, and those that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_core.wire.config import ModelOptions
from model_executor.errors import ConfigRefused
from model_executor.models.reader import read_spec
from tests.fixtures.expert_families import VOCAB, write_experts
from tests.fixtures.families import edit_config
from tests.fixtures.reference import Reference
from tests.model_executor.engine import load

PROMPT = np.random.default_rng(7).integers(0, VOCAB, 30).tolist()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("mixtral") / "model", "mixtral", num_hidden_layers=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": ...},
        {"rope_parameters": ..., "rope_theta": 300.0},
        {"sliding_window": None},
        {"sliding_window": 4},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 6},
        {"num_experts_per_tok": ...},
        {"num_local_experts": ..., "num_experts": 6},
        {"head_dim": 8},
        {"rms_norm_eps": ...},
    ],
    ids=str,
)
def test_variants_equal_the_reference(mixtral: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = edit_config(shutil.copytree(mixtral, tmp_path / "model"), **fields)
    expected = Reference(folder).logits(PROMPT)
    assert np.abs(load(folder).logits(PROMPT) - expected).max() <= 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: 7: at most 6 experts"),
        ({"num_experts": 5}, "num_local_experts: 6: contradicts num_experts"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob: False: MixtralForCausalLM divides"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_shared_experts": 1}, "n_shared_experts: 1: MixtralForCausalLM is computed without it"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"moe_intermediate_size": 8}, "moe_intermediate_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"kv_lora_rank": 4}, "kv_lora_rank"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(
    mixtral: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = edit_config(shutil.copytree(mixtral, tmp_path / "model"), **fields)
    with pytest.raises(ConfigRefused, match=message):
        read_spec(folder, ModelOptions())
