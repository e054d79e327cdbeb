"""Qwen 2 and Qwen 3, dense: config.json to spec, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from model_executor.models import llama
from model_executor.models.config import ConfigFile
from model_executor.models.fields import activation, check_no_bias, check_plain, make_spec, read_head_dim, read_heads
from model_executor.models.layer_types import SLIDING, read_layer_types, read_layer_window, slides_by_depth
from model_executor.models.registry import Family
from model_executor.models.rope import read_rope
from model_executor.models.spec import AttentionSpec, MlpSpec, ModelSpec, NormSpec
from model_executor.weights.parameters import NameTable

QK_NORM: Final[Mapping[str, tuple[str, ...]]] = {"attention.qk_norm": ("self_attn.q_norm", "self_attn.k_norm")}
NAMES3: Final[NameTable] = structs.replace(llama.NAMES, parts={**llama.NAMES.parts, **QK_NORM})

DEFAULT_KV_HEADS: Final = 32
DEFAULT_MAX_POSITION: Final = 32768
DEFAULT_HEAD_DIM3: Final = 128


def qwen2() -> Family:
    """Qwen2ForCausalLM: biases on queries, keys and values; the blocks from some depth on may have a window."""
    return Family(read=_read_qwen2, names=llama.NAMES)


def qwen3() -> Family:
    """Qwen3ForCausalLM: a norm on each head of queries and keys; heads of any width."""
    return Family(read=_read_qwen3, names=NAMES3)


def _read_qwen2(config: ConfigFile) -> ModelSpec:
    head_dim = read_head_dim(config, config.count("num_attention_heads"))
    return _read(config, _attention(config, head_dim, qkv_bias=True))


def _read_qwen3(config: ConfigFile) -> ModelSpec:
    head_dim = config.count("head_dim", DEFAULT_HEAD_DIM3)
    bias = config.flag("attention_bias", default=False)
    norm = read_norm(config)
    return _read(config, _attention(config, head_dim, qkv_bias=bias, output_bias=bias, qk_norm=norm))


def _attention(
    config: ConfigFile,
    head_dim: int,
    *,
    qkv_bias: bool,
    output_bias: bool = False,
    qk_norm: NormSpec | None = None,
) -> tuple[AttentionSpec, ...]:
    """The attention of each block."""
    heads, kv_heads = read_heads(config, DEFAULT_KV_HEADS)
    full = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, config.count("max_position_embeddings", DEFAULT_MAX_POSITION)),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
    )
    types = read_layer_types(config, slides_by_depth(config))
    sliding = structs.replace(full, window=read_layer_window(config, types, used=False))
    return tuple(sliding if kind == SLIDING else full for kind in types)


def read_norm(config: ConfigFile) -> NormSpec:
    """The norm of all places."""
    return NormSpec(config.number("rms_norm_eps", 1e-6))


def _read(config: ConfigFile, attention: tuple[AttentionSpec, ...]) -> ModelSpec:
    check_plain(config)
    check_no_bias(config, "mlp_bias")
    mlp = MlpSpec(config.count("intermediate_size"), activation(config))
    return make_spec(config, attention, [mlp] * len(attention), read_norm(config))
