"""Llama and Mistral: config.json to spec, and the names of their tensors."""

from __future__ import annotations

from typing import Final

from model_executor.models.config import ConfigFile
from model_executor.models.fields import (
    activation,
    check_no_bias,
    check_plain,
    make_spec,
    read_head_dim,
    read_heads,
    read_window,
)
from model_executor.models.registry import Family
from model_executor.models.rope import read_rope
from model_executor.models.spec import AttentionSpec, MlpSpec, ModelSpec, NormSpec
from model_executor.weights.parameters import IgnoreRule, NameTable

NAMES: Final = NameTable(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    block="model.layers.{source}.",
    parts={
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
    ignored=(
        IgnoreRule(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", "rotation is computed from config.json"),
        IgnoreRule(r"model\.layers\.\d+\.self_attn\.(masked_)?bias", "a mask that old checkpoints carry along"),
    ),
)


def llama() -> Family:
    """LlamaForCausalLM."""
    return Family(read=_read_llama, names=NAMES)


def mistral() -> Family:
    """MistralForCausalLM: Llama with a sliding window, without biases, and with other defaults."""
    return Family(read=_read_mistral, names=NAMES)


def _read_llama(config: ConfigFile) -> ModelSpec:
    return _read(
        config,
        read_heads(config),
        max_position=config.count("max_position_embeddings", 2048),
        window=read_window(config, None, honoured=False),
        attention_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def _read_mistral(config: ConfigFile) -> ModelSpec:
    check_no_bias(config, "attention_bias", "mlp_bias")
    # transformers' defaults differ for an absent key and for null.
    window_default = None if "sliding_window" in config.fields else 4096
    return _read(
        config,
        read_heads(config, 8),
        max_position=config.count("max_position_embeddings", 131072),
        window=read_window(config, window_default, honoured=True),
        attention_bias=False,
        mlp_bias=False,
    )


def _read(
    config: ConfigFile,
    head_counts: tuple[int, int],
    *,
    max_position: int,
    window: int | None,
    attention_bias: bool,
    mlp_bias: bool,
) -> ModelSpec:
    check_plain(config)
    heads, kv_heads = head_counts
    head_dim = read_head_dim(config, heads)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, max_position),
        window=window,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )
    mlp = MlpSpec(config.count("intermediate_size"), activation(config), mlp_bias)
    layers = config.count("num_hidden_layers")
    return make_spec(config, [attention] * layers, [mlp] * layers, NormSpec(config.number("rms_norm_eps", 1e-6)))
