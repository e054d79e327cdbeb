"""The load plan: which tensors, which shards, and what is refused. No tensor is read here."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from engine_core.wire.config import ModelOptions
from model_executor.errors import WeightsRefused
from model_executor.models.reader import read_spec
from model_executor.models.registry import family
from model_executor.weights.index import Checkpoint
from model_executor.weights.layer_plan import plan_layers
from model_executor.weights.plan import LoadPlan, plan_load
from tests.fixtures.llama import Shape, parameter_shapes, random_weights
from tests.model_executor.engine import SIX, write_small

ONE_TENSOR_A_SHARD = len(parameter_shapes(SIX))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ONES = np.ones(4, dtype=np.float32)


def plan(folder: Path, layers: list[int] | None = None) -> tuple[LoadPlan, Checkpoint]:
    """The load plan of a folder, and the checkpoint it was made from."""
    spec = read_spec(folder, ModelOptions())
    checkpoint = Checkpoint.open(folder)
    return plan_load(spec, plan_layers(spec, layers), family(spec.architecture).names, checkpoint), checkpoint


def states(load: LoadPlan) -> dict[str, str]:
    """State of each tensor set aside."""
    return {record.name: record.state for record in load.set_aside}


def layer_of(name: str) -> int | None:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


@pytest.mark.parametrize("layers", [None, [0, 2, 5], [4], [5, 1]], ids=str)
def test_exactly_the_chosen_layers(tmp_path: Path, layers: list[int] | None) -> None:
    load, checkpoint = plan(write_small(tmp_path, SIX, shards=ONE_TENSOR_A_SHARD), layers)
    wanted = {None, *(range(6) if layers is None else layers)}
    expected = {name for name in checkpoint.files if layer_of(name) in wanted}
    assert {step.entry.name for step in load.steps} == expected
    assert set(states(load)) == checkpoint.files.keys() - expected
    assert set(states(load).values()) <= {"skipped_by_plan"}
    assert set(load.files_needed) == {checkpoint.files[name] for name in expected}
    assert set(load.files_needed) | set(load.files_skipped) == set(checkpoint.shards)
    assert checkpoint.opened == sorted(load.files_needed)
    sizes = parameter_shapes(SIX)
    assert load.bytes_to_read == sum(4 * int(np.prod(sizes[name])) for name in expected)


def test_steps_follow_the_files(tmp_path: Path) -> None:
    load, _ = plan(write_small(tmp_path, SIX, shards=4))
    places = [(step.entry.file, step.entry.begin) for step in load.steps]
    assert places == sorted(places)


def test_runtime_and_source_index(tmp_path: Path) -> None:
    load, _ = plan(write_small(tmp_path, SIX), [5, 1])
    (down,) = [step for step in load.steps if step.parameter.name == "blocks.0.mlp.down.weight"]
    assert down.entry.name == "model.layers.5.mlp.down_proj.weight"
    fused = [
        (step.entry.name, step.offset) for step in load.steps if step.parameter.name == "blocks.1.attention.qkv.weight"
    ]
    prefix = "model.layers.1.self_attn."
    assert sorted(fused, key=lambda item: item[1]) == [
        (f"{prefix}q_proj.weight", 0),
        (f"{prefix}k_proj.weight", 32),
        (f"{prefix}v_proj.weight", 48),
    ]


def test_rules(tmp_path: Path) -> None:
    """Buffers of old checkpoints are ignored, in blocks that run and in others."""
    buffers = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.5.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.1.self_attn.masked_bias",
        "model.layers.1.self_attn.bias",
    ]
    load, _ = plan(write_small(tmp_path, SIX, tensors=dict.fromkeys(buffers, ONES)), [0])
    ignored = {record.name: record.rule for record in load.set_aside if record.state == "ignored_by_rule"}
    assert ignored.keys() == set(buffers)
    assert all(ignored.values())


def test_prediction_layers_are_ignored_by_rule(tmp_path: Path) -> None:
    own, beyond = "model.layers.6.eh_proj.weight", "model.layers.7.eh_proj.weight"
    load, _ = plan(write_small(tmp_path / "a", SIX, tensors={own: ONES}, num_nextn_predict_layers=1))
    assert states(load) == {own: "ignored_by_rule"}
    for name, tensor, count in (("b", own, 0), ("c", beyond, 1)):
        folder = write_small(tmp_path / name, SIX, tensors={tensor: ONES}, num_nextn_predict_layers=count)
        with pytest.raises(WeightsRefused, match=f"1 unexpected: {tensor}"):
            plan(folder)


def test_missing_and_unexpected_are_listed(tmp_path: Path) -> None:
    gate, extra = "model.layers.2.mlp.gate_proj.weight", "model.layers.2.mlp.extra.weight"
    folder = write_small(tmp_path, SIX, tensors={gate: None, extra: ONES})
    with pytest.raises(WeightsRefused, match=f"1 missing: {gate}; 1 unexpected: {extra}") as caught:
        plan(folder)
    assert (caught.value.missing, caught.value.unexpected) == ((gate,), (extra,))


def test_long_lists_are_cut(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX, num_hidden_layers=8)
    with pytest.raises(WeightsRefused, match=r"18 missing: .* and 10 more") as caught:
        plan(folder)
    assert len(caught.value.missing) == 18


def test_bias_without_a_place_is_unexpected(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match=r"unexpected: .*bias"):
        plan(write_small(tmp_path, Shape(hidden=32, layers=1, vocab=64, attention_bias=True), attention_bias=False))


def test_wrong_shape(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    folder = write_small(tmp_path, SIX, tensors={name: np.ones((32, 49), dtype=np.float32)})
    with pytest.raises(WeightsRefused, match=re.escape(f"{name} of shape [32, 49], not [32, 48]")):
        plan(folder)


def test_wrong_dtype(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    folder = write_small(tmp_path, SIX)
    tensors = {name: torch.from_numpy(value.copy()) for name, value in random_weights(SIX, seed=3, std=0.15).items()}
    tensors[EMBEDDING] = torch.zeros(64, 32, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsRefused, match=f"{EMBEDDING} of dtype I8, not F32, BF16, F16"):
        plan(folder)


def test_head_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match=f"1 missing: {HEAD}"):
        plan(write_small(tmp_path, SIX, tensors={HEAD: None}))


def test_tied_pair(tmp_path: Path) -> None:
    def tied(name: str, *removed: str) -> LoadPlan:
        tensors = dict.fromkeys(removed)
        return plan(write_small(tmp_path / name, SIX, tensors=tensors, tie_word_embeddings=True))[0]

    assert tied("a", HEAD).twin is None
    both = tied("b").twin
    assert both is not None
    assert [entry.name for entry in both] == [HEAD, EMBEDDING]
    swapped = tied("c", EMBEDDING)
    assert [step.entry.name for step in swapped.steps if step.parameter.name == "embedding.weight"] == [HEAD]
    with pytest.raises(WeightsRefused, match=f"1 missing: {EMBEDDING}"):
        tied("d", HEAD, EMBEDDING)
