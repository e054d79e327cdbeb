"""Row by row: which sections of a config mean the same rotation, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_executor.errors import ConfigRefused
from model_executor.models.config import ConfigFile
from model_executor.models.rope import read_layer_ropes, read_rope
from model_executor.models.spec import RopeSpec

PATH = Path("config.json")
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


def read(**fields: Any) -> RopeSpec:
    """The rotation of a config with these fields; 64 positions, heads of 8."""
    return read_rope(ConfigFile(PATH, fields), 8, 64)


PLAIN = RopeSpec("default", 10000.0, 8, 64)
LINEAR = RopeSpec("linear", 10000.0, 8, 128, factor=2.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, PLAIN),
        ({"rope_scaling": None}, PLAIN),
        ({"rope_scaling": {}}, PLAIN),
        ({"rope_parameters": {}}, PLAIN),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, PLAIN),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LINEAR),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, LINEAR),
        ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}}, LINEAR),
        ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, LINEAR),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}}, LINEAR),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}, LINEAR),
        ({"rope_theta": 5e5}, RopeSpec("default", 5e5, 8, 64)),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 5e5}}, RopeSpec("default", 5e5, 8, 64)),
    ],
    ids=str,
)
def test_rope_styles(fields: dict[str, Any], expected: RopeSpec) -> None:
    assert read(**fields) == expected


def test_rope_original_position() -> None:
    """Outside goes before inside, inside before max_position_embeddings."""
    inside = {**LLAMA3, "original_max_position_embeddings": 16}
    assert read(rope_scaling=LLAMA3).original_max_position == 64
    assert read(rope_scaling=inside).original_max_position == 16
    assert read(rope_scaling=inside, original_max_position_embeddings=32).original_max_position == 32


def test_yarn_attention_factor() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read(rope_scaling=yarn).attention_factor == pytest.approx(1.1386294361)
    assert read(rope_scaling={**yarn, "attention_factor": 0.5}).attention_factor == 0.5
    assert read(rope_scaling={**yarn, "factor": 1.0}).attention_factor == 1.0
    assert read(rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}).attention_factor == 1.0
    assert read(rope_scaling={**yarn, "mscale": 2.0}).attention_factor == pytest.approx(1.1386294361)


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_scaling.rope_type: 'spiral'"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_scaling.type: 'spiral'"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_parameters.rope_type: 'spiral'"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "rope_scaling.factor: 1e[+]308: makes"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, "rope_scaling.factor: 1e[+]308: makes"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "rope_scaling.low_freq_factor"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: 0.5"),
    ],
    ids=str,
)
def test_rope_refuses_by_name(fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigRefused, match=culprit):
        read(**fields)


@pytest.mark.parametrize("dim", [7, 2])
def test_rope_needs_pairs(dim: int) -> None:
    with pytest.raises(ConfigRefused, match=f"head_dim: {dim}"):
        read_rope(ConfigFile(PATH, {}), dim, 64)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({}, RopeSpec("default", 1e6, 8, 64), PLAIN),
        ({"rope_theta": 5e5}, RopeSpec("default", 5e5, 8, 64), PLAIN),
        ({"rope_local_base_freq": 7.0}, RopeSpec("default", 1e6, 8, 64), RopeSpec("default", 7.0, 8, 64)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 1e4},
            LINEAR,
            PLAIN,
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            LINEAR,
            PLAIN,
        ),
        (
            {"rope_parameters": {SLIDING: {"rope_theta": 7.0}, FULL: None}, "rope_theta": 9.0},
            RopeSpec("default", 9.0, 8, 64),
            RopeSpec("default", 7.0, 8, 64),
        ),
    ],
    ids=str,
)
def test_a_rotation_for_each_layer_type(fields: dict[str, Any], full: RopeSpec, sliding: RopeSpec) -> None:
    assert read_layer_ropes(ConfigFile(PATH, fields), 8, 64) == {FULL: full, SLIDING: sliding}


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"linear_attention": {}}}, "rope_parameters.linear_attention"),
        ({"rope_parameters": {FULL: {"rope_type": "linear"}}}, f"rope_parameters.{FULL}.factor"),
        ({"rope_parameters": {SLIDING: {"rope_type": "spiral"}}}, f"rope_parameters.{SLIDING}.rope_type"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {FULL: {"factor": 2.0}}}, f"rope_scaling.{FULL}"),
    ],
    ids=str,
)
def test_rotations_for_layer_types_refuse_by_name(fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigRefused, match=culprit):
        read_layer_ropes(ConfigFile(PATH, fields), 8, 64)
