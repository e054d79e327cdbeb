"""Variants of config.json that mean the same or another Gemma, and those that are refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors import safe_open
from transformers import AutoConfig

from engine_core.wire.config import ModelOptions
from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.errors import ConfigRefused
from model_executor.models.reader import read_spec
from tests.fixtures.families import VOCAB, edit_config, write_family
from tests.fixtures.reference import Reference
from tests.fixtures.vision import Layout, write_conditional
from tests.model_executor.engine import BLOCK_SIZE, CPU, load

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(7).integers(1, VOCAB, 30).tolist()
OLD_STYLE3 = {
    "layer_types": ...,
    "rope_parameters": ...,
    "dtype": ...,
    "torch_dtype": "float32",
    "rope_theta": 5000.0,
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "sliding_window_pattern": 3,
}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("gemma2") / "model", "gemma2")


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("gemma3") / "model", "gemma3_text")


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
        {"layer_types": [FULL] * 6},
        {"layer_types": [SLIDING] * 4 + [FULL] * 2, "sliding_window": 1},
        {"sliding_window": 1000},
        {"attn_logit_softcapping": None},
        {"attn_logit_softcapping": ...},
        {"final_logit_softcapping": None},
        {"final_logit_softcapping": ...},
        {"query_pre_attn_scalar": ...},
        {"rope_parameters": ..., "rope_theta": 300.0},
        {"hidden_activation": ...},
        {"hidden_activation": "silu"},
        {"hidden_activation": "silu", "hidden_act": "gelu"},
        {"tie_word_embeddings": ...},
        {"rms_norm_eps": 0.1},
    ],
    ids=str,
)
def test_gemma2_variants(gemma2: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    assert_parity(variant(gemma2, tmp_path, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        OLD_STYLE3,
        {**OLD_STYLE3, "rope_scaling": None, "rope_theta": ..., "rope_local_base_freq": ...},
        {**OLD_STYLE3, "sliding_window_pattern": ...},
        {"layer_types": ..., "sliding_window_pattern": 2},
        {"layer_types": [FULL] * 6},
        {"layer_types": [SLIDING] * 6},
        {"rope_parameters": {FULL: {"rope_type": "default"}}},
        {"rope_parameters": {SLIDING: {"rope_theta": 50.0, "rope_type": "default"}, FULL: None}},
        {"final_logit_softcapping": 3.0},
        {"query_pre_attn_scalar": ...},
    ],
    ids=str,
)
def test_gemma3_variants(gemma3: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    assert_parity(variant(gemma3, tmp_path, **fields))


def test_both_styles_are_one_spec(gemma3: Path, tmp_path: Path) -> None:
    assert "rope_local_base_freq" not in json.loads((gemma3 / "config.json").read_text())
    assert read_spec(variant(gemma3, tmp_path, **OLD_STYLE3), ModelOptions()) == read_spec(gemma3, ModelOptions())


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_biases_and_a_head_of_its_own(tmp_path: Path, model_type: str) -> None:
    assert_parity(write_family(tmp_path / "model", model_type, attention_bias=True, tie_word_embeddings=False))


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_absent_fields_mean_what_they_mean_to_transformers(tmp_path: Path, model_type: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 12, "intermediate_size": 8}
    needed = {"model_type": model_type, "vocab_size": 50, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(needed))
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = read_spec(tmp_path, ModelOptions())
    attention = [layer.attention for layer in ours.layers]
    assert ours.tie == theirs.tie_word_embeddings
    assert ours.final_soft_cap == theirs.final_logit_softcapping
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.norm.eps == theirs.rms_norm_eps
    assert [part.window for part in attention] == [
        theirs.sliding_window if k == SLIDING else None for k in theirs.layer_types
    ]
    assert {part.head_dim for part in attention} == {theirs.head_dim}
    assert {part.num_kv_heads for part in attention} == {theirs.num_key_value_heads}
    assert {part.scale for part in attention} == {theirs.query_pre_attn_scalar**-0.5}
    assert {part.soft_cap for part in attention} == {theirs.attn_logit_softcapping}
    assert ours.layers[0].mlp.activation == "gelu_tanh"
    ropes = theirs.rope_parameters
    for part, kind in zip(attention, theirs.layer_types, strict=True):
        assert part.rope is not None
        assert part.rope.theta == ropes.get(kind, ropes)["rope_theta"]


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping: 0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping: -1"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0"),
        ({"sliding_window": None}, "sliding_window: None"),
        ({"use_sliding_window": False}, "use_sliding_window: False"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ({"layer_types": [FULL] * 7}, "layer_types: .*7 entries for num_hidden_layers = 6"),
        ({"hidden_activation": ..., "hidden_act": "silu"}, "hidden_act: 'silu'"),
        ({"hidden_activation": "sine"}, "hidden_activation: 'sine'"),
        ({"mlp_bias": True}, "mlp_bias: True"),
        ({"rope_local_base_freq": 100.0}, "rope_local_base_freq: 100"),
        ({"sliding_window_pattern": 3}, "sliding_window_pattern: 3"),
        ({"rope_parameters": {FULL: {"rope_theta": 5.0}}}, f"rope_parameters.{FULL}"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: 2"),
    ],
    ids=str,
)
def test_gemma2_refuses_by_name(gemma2: Path, tmp_path: Path, fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigRefused, match=culprit):
        read_spec(variant(gemma2, tmp_path, **fields), ModelOptions())


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern: 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "rope_parameters.rope_type: 'linear'"),
        ({"rope_parameters": {FULL: {"rope_type": "spiral"}}}, f"rope_parameters.{FULL}.rope_type: 'spiral'"),
        ({"rope_parameters": {SLIDING: {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor: 0.5"),
        ({"rope_local_base_freq": 1.0, "rope_parameters": ...}, "rope_theta: 1.0"),
        ({"text_config": {"hidden_size": 8}}, "text_config"),
    ],
    ids=str,
)
def test_gemma3_refuses_by_name(gemma3: Path, tmp_path: Path, fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigRefused, match=culprit):
        read_spec(variant(gemma3, tmp_path, **fields), ModelOptions())


def test_a_text_model_under_the_name_of_the_other_is_refused(gemma3: Path, tmp_path: Path) -> None:
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    with pytest.raises(ConfigRefused, match="text_config: None: is required"):
        read_spec(variant(gemma3, tmp_path, **fields), ModelOptions())


def test_gemma2_runs_on_a_fast_kernel(gemma2: Path) -> None:
    table = KernelTable()
    choose = Chooser(table, torch.float32, CPU, BLOCK_SIZE)
    for layer in read_spec(gemma2, ModelOptions()).layers:
        choose(layer.attention)
    choices = [choice for choice in table.explain() if choice.operator == "attention"]
    assert [(choice.chosen, "soft cap 3" in choice.problem) for choice in choices] == [("torch_matmul", True)] * 2
    reasons = {candidate.name: candidate.reasons for candidate in choices[0].candidates}
    assert reasons["torch_sdpa"] == ["soft_cap 3: has no soft cap"]


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}], ids=str)
@pytest.mark.parametrize("layout", ["published", "renamed"])
def test_text_of_a_model_that_takes_images_too(tmp_path: Path, layout: Layout, fields: dict[str, Any]) -> None:
    folder = write_conditional(tmp_path / "model", layout, **fields)
    assert_parity(folder)
    report = load(folder).report
    rules = {each.rule for each in report.tensors if each.state == "ignored_by_rule"}
    assert rules == {"the part for images; text alone is served"}
    assert report.counts["ignored_by_rule"] == sum("vision" in n or "multi_modal" in n for n in tensor_names(folder))


def tensor_names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "np") as file:
        return list(file.keys())


def test_the_text_part_is_the_text_model(gemma3: Path, tmp_path: Path) -> None:
    """A published text_config leaves out what is as transformers has it by default."""
    spec = read_spec(write_conditional(tmp_path / "model"), ModelOptions())
    text = read_spec(gemma3, ModelOptions())
    assert structs.replace(spec, architecture=text.architecture) == text
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    spec, theirs = read_spec(tmp_path, ModelOptions()), AutoConfig.from_pretrained(tmp_path).text_config
    assert (spec.vocab_size, spec.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert spec.layers[0].attention.num_heads == theirs.num_attention_heads
    assert spec.dtype == "bfloat16"
    windows = [theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types]
    assert [layer.attention.window for layer in spec.layers] == windows


# The published form of Gemma 3 4B.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"text_config": ...}, "text_config: None: is required"),
        ({"text_config": {**PUBLISHED["text_config"], "hidden_size": 0}}, "text_config.hidden_size: 0"),
        ({"text_config": {**PUBLISHED["text_config"], "model_type": "llama"}}, "text_config.model_type: 'llama'"),
        ({"tie_word_embeddings": False}, "text_config.tie_word_embeddings"),
        ({"text_config": {**PUBLISHED["text_config"], "final_logit_softcapping": 3.0}}, "final_logit_softcapping: 3.0"),
        ({"audio_config": {"a": 1}}, "audio_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights are not served"),
        ({"model_type": "gemma3_text"}, "model_type: 'gemma3_text'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_text_parts_that_are_refused(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    fields = {name: value for name, value in {**PUBLISHED, **edit}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigRefused, match=re.escape(message)):
        read_spec(tmp_path, ModelOptions())
