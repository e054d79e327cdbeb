"""DeepSeek's blocks, their prediction block, variants of config.json, and those that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_core.wire.config import ModelOptions
from model_executor.errors import ConfigRefused, WeightsRefused
from model_executor.models.reader import read_spec
from tests.fixtures.expert_families import VOCAB, YARN, add_mtp, read_tensors, rewrite, write_experts
from tests.fixtures.families import edit_config
from tests.fixtures.reference import Reference
from tests.model_executor.engine import load

PROMPT = np.random.default_rng(7).integers(0, VOCAB, 30).tolist()
PUBLIC_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("v2") / "model", "deepseek-v2", num_hidden_layers=4)


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("v3") / "model", "deepseek-v3", num_hidden_layers=4)


def changed(folder: Path, to: Path, fields: dict[str, Any]) -> Path:
    return edit_config(shutil.copytree(folder, to / "model"), **fields)


def assert_parity(folder: Path) -> None:
    expected = Reference(folder).logits(PROMPT)
    assert expected.std() > 0.1
    loaded = load(folder)
    for chunk in (None, 4):
        assert np.abs(loaded.logits(PROMPT, chunk=chunk) - expected).max() <= 1e-4


@pytest.mark.parametrize(
    "fields",
    [
        {"topk_method": "greedy"},
        {"topk_method": ...},
        {"n_group": 6, "topk_group": 1, "num_experts_per_tok": 2},
        {"routed_scaling_factor": 1.0},
        {"rope_parameters": ...},
        {"rope_scaling": {**YARN, "mscale": 0.9}, "rope_parameters": ..., "rope_theta": 300.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0, "mscale_all_dim": 0.5}},
        {"scoring_func": "softmax"},
        {"rope_interleave": True},
    ],
    ids=str,
)
def test_variants_of_v2_equal_the_reference(v2: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    assert_parity(changed(v2, tmp_path, fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_interleave": False},
        {"rope_interleave": ...},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": ...},
        {"n_group": 1, "topk_group": 1},
        {"n_group": 6, "topk_group": 3},
        {"num_experts_per_tok": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"rope_parameters": ..., "rope_scaling": {**YARN, "mscale_all_dim": 0.0}},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1},
        {"rms_norm_eps": 0.1},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_variants_of_v3_equal_the_reference(v3: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    assert_parity(changed(v3, tmp_path, fields))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek-v3", {"attention_bias": True}),
        ("deepseek-v3", {"first_k_dense_replace": 0, "n_shared_experts": 3}),
        ("deepseek-v3", {"q_lora_rank": None, "tie_word_embeddings": True}),
        ("deepseek-v2", {"attention_bias": True, "mlp_bias": True}),
        ("deepseek-v2", {"first_k_dense_replace": 3}),
    ],
    ids=str,
)
def test_other_tensors(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    assert_parity(write_experts(tmp_path, name, num_hidden_layers=3, **fields))


def test_moe_layer_freq(v3: Path, tmp_path: Path) -> None:
    """transformers knows no such field: the reference gets its dense block by hand."""
    folder = changed(v3, tmp_path, {"first_k_dense_replace": 1, "moe_layer_freq": 2})
    tensors = read_tensors(folder)
    sparse = {name: values for name, values in tensors.items() if name.startswith("model.layers.3.mlp.")}
    dense = {name: values for name, values in tensors.items() if name.startswith("model.layers.1.mlp.")}
    renamed = {f"model.layers.2.mlp.{name.removeprefix('model.layers.3.mlp.')}": sparse[name] for name in sparse}
    kept = {name: values for name, values in tensors.items() if not name.startswith(("model.layers.2.mlp.",))}
    back = {f"model.layers.3.mlp.{name.removeprefix('model.layers.1.mlp.')}": dense[name] for name in dense}
    rewrite(folder, {**{name: x for name, x in kept.items() if name not in sparse}, **renamed, **back}, shards=1)
    loaded = load(folder)
    kinds = [layer.mlp.kind for layer in loaded.spec.layers]
    assert kinds == ["gated", "gated", "moe", "gated"]
    layers = Reference(v3).model.model.layers
    reference = Reference(v3)
    mine = reference.model.model.layers
    mine[2].mlp, mine[3].mlp = layers[3].mlp, layers[1].mlp
    assert np.abs(loaded.logits(PROMPT) - reference.logits(PROMPT)).max() <= 1e-4


@pytest.mark.parametrize("count", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_a_prediction_block_is_set_aside_and_told(v3: Path, tmp_path: Path, count: str) -> None:
    folder = changed(v3, tmp_path, {"num_nextn_predict_layers": ..., count: 1})
    expected = load(folder, [0, 3]).logits(PROMPT)
    names = add_mtp(folder)
    loaded = load(folder, [0, 3])
    assert loaded.spec.mtp_layers == 1
    assert np.array_equal(loaded.logits(PROMPT), expected)
    ignored = [record for record in loaded.report.tensors if record.state == "ignored_by_rule"]
    assert [record.name for record in ignored] == names
    assert all("num_nextn_predict_layers" in record.rule for record in ignored)


def test_a_prediction_block_that_is_not_announced_is_refused(v3: Path, tmp_path: Path) -> None:
    """Otherwise a block beyond a shortened depth would pass for one."""
    folder = changed(v3, tmp_path, {"num_nextn_predict_layers": 0})
    add_mtp(folder)
    with pytest.raises(WeightsRefused, match=r"model\.layers\.4\."):
        load(folder)


def test_router_and_correction_stay_float32(v3: Path) -> None:
    loaded = load(v3, [3], dtype=torch.bfloat16)
    found = {name: parameter.dtype for name, parameter in loaded.model.named_parameters()}
    wide = {name for name, dtype in found.items() if dtype == torch.float32}
    assert wide == {"blocks.0.mlp.router.scores.weight", "blocks.0.mlp.router.correction"}
    records = {record.name: record for record in loaded.report.tensors}
    for name, parameter in loaded.model.named_parameters():
        assert records[name].nbytes == parameter.nbytes
        assert f"torch.{records[name].dtype}" == str(parameter.dtype)


def test_the_public_shape_of_v3(tmp_path: Path) -> None:
    """61 latents of 512 + 64 elements are 70,272 bytes a token in bfloat16."""
    edit_config(write_config(tmp_path, PUBLIC_V3))
    spec = read_spec(tmp_path, ModelOptions())
    kinds = [layer.mlp.kind for layer in spec.layers]
    assert kinds == ["gated"] * 3 + ["moe"] * 58
    assert sum(layer.attention.kv_elements for layer in spec.layers) * 2 == 70_272
    assert spec.max_model_len == 163_840
    assert spec.mtp_layers == 1
    scale = spec.layers[0].attention.scale
    assert scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return edit_config(folder, **config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "quantization_config"),
        ({"scoring_func": "softmax"}, "scoring_func: .*is computed with sigmoid"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"n_group": 5}, "n_group: 5: must divide the number of experts, 12"),
        ({"n_group": 12}, "n_group: 12: groups of at least two"),
        ({"topk_group": 5}, "topk_group: 5: at most n_group, 4"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: 7: at most 6"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2: latent attention has one"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"qk_head_dim": 99}, "qk_head_dim: 99: contradicts"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
        ({"final_logit_softcapping": 3.0}, "final_logit_softcapping"),
    ],
    ids=str,
)
def test_what_v3_cannot_honour_is_refused(v3: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigRefused, match=message):
        read_spec(changed(v3, tmp_path, fields), ModelOptions())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"topk_method": "noaux_tc"}, "topk_method: .*known: greedy, group_limited_greedy"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"n_group": None}, "n_group: .*is required"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok: .*is required"),
    ],
    ids=str,
)
def test_what_v2_cannot_honour_is_refused(v2: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigRefused, match=message):
        read_spec(changed(v2, tmp_path, fields), ModelOptions())
