from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_executor.errors import ConfigRefused
from model_executor.models.config import ConfigFile
from model_executor.models.fields import PLAIN_VALUES, check_plain, read_window


def config(**fields: Any) -> ConfigFile:
    """A config of three layers with these fields."""
    return ConfigFile(Path("config.json"), {"num_hidden_layers": 3, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"query_pre_attn_scalar": 256},
        {"num_experts": 8},
        {"num_local_experts": 8},
        {"logit_scale": 0.0625},
        {"embedding_multiplier": 12.0},
        {"residual_multiplier": 0.22},
        {"attention_multiplier": 0.0078125},
        {"partial_rotary_factor": 0.5},
        {"no_rope_layers": [1, 0]},
        {"first_k_dense_replace": 3},
        {"vision_config": {"hidden_size": 8}},
        {"is_causal": False},
    ],
    ids=str,
)
def test_fields_that_change_the_maths(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ConfigRefused, match=name) as caught:
        check_plain(config(**fields))
    assert caught.value.field == name


def test_refusal_names_the_method() -> None:
    with pytest.raises(ConfigRefused, match=r"quantization_config: .*'quant_method': 'fp8'"):
        check_plain(config(quantization_config={"quant_method": "fp8"}))


def test_plain_values_pass() -> None:
    for name, values in PLAIN_VALUES.items():
        for value in values:
            check_plain(config(**{name: value}))
    check_plain(config(attention_dropout=0.1, pretraining_tp=2, use_cache=False, unknown={"a": 1}))


@pytest.mark.parametrize(
    ("fields", "default", "window"),
    [
        ({}, None, None),
        ({}, 4096, 4096),
        ({"sliding_window": 5}, None, 5),
        ({"sliding_window": 5, "use_sliding_window": True}, None, 5),
        ({"sliding_window": None, "use_sliding_window": False}, None, None),
        ({"sliding_window": 5, "layer_types": ["sliding_attention"] * 3}, None, 5),
        ({"layer_types": ["full_attention"] * 3}, None, None),
    ],
    ids=str,
)
def test_window(fields: dict[str, Any], default: int | None, window: int | None) -> None:
    assert read_window(config(**fields), default, honoured=True) == window


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"sliding_window": 5, "use_sliding_window": False}, "use_sliding_window"),
        ({"sliding_window": -5}, "sliding_window"),
        ({"sliding_window": 5, "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"sliding_window": 5, "layer_types": ["sliding_attention"] * 2}, "2 entries for num_hidden_layers = 3"),
        ({"layer_types": ["full_attention"] * 4}, "4 entries for num_hidden_layers = 3"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types"),
    ],
    ids=str,
)
def test_window_refused(fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigRefused, match=culprit):
        read_window(config(**fields), None, honoured=True)


def test_window_where_there_is_none() -> None:
    with pytest.raises(ConfigRefused, match="sliding_window: 5"):
        read_window(config(sliding_window=5), None, honoured=False)
    assert read_window(config(sliding_window=5, use_sliding_window=False), None, honoured=False) is None
