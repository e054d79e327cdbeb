from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_core.wire.config import ModelOptions
from model_executor.errors import CheckpointBroken, ConfigRefused, UnknownArchitecture
from model_executor.models.reader import read_spec
from model_executor.models.spec import ModelSpec
from tests.fixtures.llama import Shape, llama_config

SHAPE = Shape(hidden=32, layers=3, heads=4, kv_heads=2, intermediate=48, vocab=64, max_position=64)


def read(folder: Path, *, max_model_len: int | None = None, **fields: Any) -> ModelSpec:
    """The spec of a config with these fields; ... removes one."""
    config = {name: value for name, value in {**llama_config(SHAPE), **fields}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder, ModelOptions(max_model_len=max_model_len))


def test_spec_of_a_llama(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert (spec.hidden_size, spec.vocab_size, spec.max_model_len, spec.tie) == (32, 64, 64, False)
    assert [layer.source for layer in spec.layers] == [0, 1, 2]
    assert {layer.class_name for layer in spec.layers} == {"grouped-full-rope10000+gated"}
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 8)
    assert attention.scale == 8**-0.5
    assert attention.window is None


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": ..., "dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": ...}, None),
        ({"torch_dtype": None, "dtype": None}, None),
        ({"torch_dtype": "auto"}, None),
    ],
)
def test_spec_dtype(tmp_path: Path, fields: dict[str, Any], dtype: str | None) -> None:
    assert read(tmp_path, **fields).dtype == dtype


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 2.5}, 160),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 64),
    ],
)
def test_max_model_len(tmp_path: Path, rope: dict[str, Any] | None, reach: int) -> None:
    assert read(tmp_path, rope_scaling=rope).max_model_len == reach
    assert read(tmp_path, rope_scaling=rope, max_model_len=reach).max_model_len == reach
    assert read(tmp_path, rope_scaling=rope, max_model_len=1).max_model_len == 1
    with pytest.raises(ConfigRefused, match=f"max_model_len: {reach + 1}: at most {reach}"):
        read(tmp_path, rope_scaling=rope, max_model_len=reach + 1)


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"torch_dtype": 16}, "torch_dtype"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 32.5}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"hidden_act": "sine"}, "hidden_act"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
        ({"model_type": "mistral"}, "model_type"),
        ({"model_type": "qwen2"}, "model_type"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_bias": True}, "attention_bias"),
    ],
    ids=str,
)
def test_spec_refuses_by_name(tmp_path: Path, fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigRefused, match=culprit) as caught:
        read(tmp_path, **fields)
    assert caught.value.field == culprit
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [{"architectures": ["ParrotForCausalLM"]}, {"architectures": None, "model_type": "parrot"}],
    ids=str,
)
def test_unknown_architecture(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitecture, match=r"(?i)parrot.* is unknown; known: .*LlamaForCausalLM, Mistral"):
        read(tmp_path, **fields)


def test_model_type_alone(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=...).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"{", "no valid JSON"),
        (b"[]", "no JSON object"),
        (b"\xff\xfe\x00", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b"", "no valid JSON"),
        (None, "No such file"),
    ],
)
def test_config_broken(tmp_path: Path, content: bytes | None, fault: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointBroken, match=fault) as caught:
        read_spec(tmp_path, ModelOptions())
    assert caught.value.path == tmp_path / "config.json"


def test_folder_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointBroken, match="gone: no such folder"):
        read_spec(tmp_path / "gone", ModelOptions())
