"""DeepSeek-V3 and Qwen3-235B-A22B in their full size, without a byte of their weights: configuration, index, headers.

The configurations have the fields and numbers of the published models; the headers list the tensors that such a model
has. Files are as long as they say and take no room on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Final

from tests.fixtures.safetensors_file import header_bytes

ITEM: Final = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
V3: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
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
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
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
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 94,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

Tensor = tuple[str, str, tuple[int, ...]]


def v3_tensors() -> Iterator[Tensor]:
    """Name, dtype and shape of all tensors of DeepSeek-V3, with the prediction block."""
    yield "model.embed_tokens.weight", "BF16", (129280, 7168)
    for layer in range(62):
        prefix = f"model.layers.{layer}."
        yield from _latent_attention(prefix)
        widths = {"mlp.": 18432} if layer < 3 else {"mlp.shared_experts.": 2048}
        if layer >= 3:
            yield f"{prefix}mlp.gate.weight", "BF16", (256, 7168)
            yield f"{prefix}mlp.gate.e_score_correction_bias", "F32", (256,)
            widths |= {f"mlp.experts.{expert}.": 2048 for expert in range(256)}
        for part, width in widths.items():
            yield from _scaled(f"{prefix}{part}gate_proj", (width, 7168))
            yield from _scaled(f"{prefix}{part}up_proj", (width, 7168))
            yield from _scaled(f"{prefix}{part}down_proj", (7168, width))
    yield "model.layers.61.embed_tokens.weight", "BF16", (129280, 7168)
    yield "model.layers.61.eh_proj.weight", "BF16", (7168, 14336)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"model.layers.61.{name}.weight", "BF16", (7168,)
    yield "model.layers.61.shared_head.head.weight", "BF16", (129280, 7168)
    yield "model.norm.weight", "BF16", (7168,)
    yield "lm_head.weight", "BF16", (129280, 7168)


def qwen_tensors() -> Iterator[Tensor]:
    """Name, dtype and shape of all tensors of Qwen3-235B-A22B."""
    yield "model.embed_tokens.weight", "BF16", (151936, 4096)
    for layer in range(94):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", "BF16", (4096,)
        for name, shape in {"q": (8192, 4096), "k": (512, 4096), "v": (512, 4096), "o": (4096, 8192)}.items():
            yield f"{prefix}self_attn.{name}_proj.weight", "BF16", shape
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", "BF16", (128,)
        yield f"{prefix}mlp.gate.weight", "BF16", (128, 4096)
        for expert in range(128):
            yield f"{prefix}mlp.experts.{expert}.gate_proj.weight", "BF16", (1536, 4096)
            yield f"{prefix}mlp.experts.{expert}.up_proj.weight", "BF16", (1536, 4096)
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", "BF16", (4096, 1536)
    yield "model.norm.weight", "BF16", (4096,)
    yield "lm_head.weight", "BF16", (151936, 4096)


def write_headers(
    folder: Path, config: dict[str, Any], tensors: Iterator[Tensor], *, shard_bytes: int = 4 * 10**9
) -> int:
    """Write configuration, index and shards that hold their headers alone; gives the bytes they stand for."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    groups: list[list[Tensor]] = [[]]
    size = total = 0
    for tensor in tensors:
        nbytes = ITEM[tensor[1]] * prod(tensor[2])
        if groups[-1] and size + nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += nbytes
        total += nbytes
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):06d}.safetensors"
        _write_shard(folder / file, group)
        weight_map.update({name: file for name, _, _ in group})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_shard(path: Path, group: list[Tensor]) -> None:
    header, place = {}, 0
    for name, dtype, shape in group:
        end = place + ITEM[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    path.write_bytes(header_bytes(header))


def _latent_attention(prefix: str) -> Iterator[Tensor]:
    for name, width in {"input_layernorm": 7168, "post_attention_layernorm": 7168}.items():
        yield f"{prefix}{name}.weight", "BF16", (width,)
    for name, width in {"q_a_layernorm": 1536, "kv_a_layernorm": 512}.items():
        yield f"{prefix}self_attn.{name}.weight", "BF16", (width,)
    maps = {
        "q_a_proj": (1536, 7168),
        "q_b_proj": (24576, 1536),
        "kv_a_proj_with_mqa": (576, 7168),
        "kv_b_proj": (32768, 512),
        "o_proj": (7168, 16384),
    }
    for name, shape in maps.items():
        yield from _scaled(f"{prefix}self_attn.{name}", shape)


def _scaled(name: str, shape: tuple[int, int]) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", shape
    yield f"{name}.weight_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))
