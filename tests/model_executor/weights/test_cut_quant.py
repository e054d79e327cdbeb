"""Module paths of quantization: moved with their blocks, and patterns that would come to mean something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_executor.errors import ConfigRefused
from model_executor.weights.cut_quant import QuantCut

MODULES = [f"model.layers.{block}.{part}" for block in (0, 3, 5) for part in ("mlp.gate_proj", "self_attn.q_proj")]


def cut(*, prediction: int = 0, modules: list[str] | None = None) -> QuantCut:
    """Blocks 0, 3 and 5 of six remain."""
    more = [f"model.layers.{6 + block}.eh_proj" for block in range(prediction)]
    return QuantCut((modules or MODULES) + more, (0, 3, 5), 6, Path("config.json"), prediction=prediction)


@pytest.mark.parametrize("name", ["ignore", "modules_to_not_convert"])
def test_lists(name: str) -> None:
    entries = [
        *("lm_head", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj", "model.layers.3.mlp"),
        *("model.layers.5.self_attn.q_proj", "re:.*self_attn.*", "mlp.experts", "layers.5"),
    ]
    quant = cut()
    assert quant.moved({"quant_method": "x", name: entries}, "quantization_config") == {
        "quant_method": "x",
        name: [
            *("lm_head", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp"),
            *("model.layers.2.self_attn.q_proj", "re:.*self_attn.*", "mlp.experts", "layers.2"),
        ],
    }
    assert [edit.field for edit in quant.edits] == [f"quantization_config.{name}"]


def test_first_blocks_keep_their_entries_to_the_letter() -> None:
    """The case of a cut to the first three blocks: what stays is not touched."""
    modules = [f"model.layers.{block}.mlp.gate_proj" for block in range(3)]
    quant = QuantCut(modules, (0, 1, 2), 6, Path("config.json"))
    entries = ["lm_head", "model.layers.5.mlp.gate_proj", "re:.*self_attn.*", "model.layers.2.mlp.gate_proj"]
    assert quant.moved(entries, "ignore") == ["lm_head", "re:.*self_attn.*", "model.layers.2.mlp.gate_proj"]


def test_objects_by_path() -> None:
    quant = cut()
    value = {"model.layers.5.mlp": {"bits": 8}, "model.layers.4.mlp": {"bits": 4}, "lm_head": {"bits": 16}}
    assert quant.moved(value, "extra_config") == {"model.layers.2.mlp": {"bits": 8}, "lm_head": {"bits": 16}}
    assert {(edit.field, edit.after is None) for edit in quant.edits} == {
        ("extra_config.model.layers.5.mlp", False),
        ("extra_config.model.layers.4.mlp", True),
    }


def test_prediction_blocks_follow() -> None:
    entries = ["model.layers.6.eh_proj", "model.layers.5.mlp"]
    assert cut().moved(entries, "ignore") == ["model.layers.2.mlp"]
    assert cut(prediction=1).moved(entries, "ignore") == ["model.layers.3.eh_proj", "model.layers.2.mlp"]


@pytest.mark.parametrize(
    "pattern",
    [
        "re:.*mlp.*",
        "re:model\\.layers\\.\\d+\\..*",
        "re:.*experts\\.[0-9]+.*",
        "model.layers.*.mlp",
        "-:.*gate",
        "*lm_head",
    ],
)
def test_patterns_that_mean_the_same_are_kept(pattern: str) -> None:
    assert cut().moved([pattern], "ignore") == [pattern]
    assert cut().moved({pattern: 1}, "dynamic") == {pattern: 1}


@pytest.mark.parametrize(
    "pattern",
    [
        "re:model\\.layers\\.5\\..*",
        "re:.*layers\\.(1|2)\\..*",
        "re:.*layers\\.[3-5]\\..*",
        "*.layers.5.*",
        "+:.*\\.3\\.mlp.*",
    ],
)
def test_patterns_that_would_mean_something_else_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigRefused, match=r"ignore: .* would treat model\.layers\.\d\..* otherwise than"):
        cut().moved([pattern], "ignore")


def test_a_pattern_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigRefused, match="no pattern that can be checked"):
        cut().moved(["re:layers.5(("], "ignore")


@pytest.mark.parametrize("value", [None, 4, "fp8", [128, 128], {"bits": 4, "sym": True}, []])
def test_all_else_is_kept(value: Any) -> None:
    quant = cut()
    assert quant.moved(value, "x") == value
    assert quant.edits == []
