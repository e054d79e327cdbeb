"""Llama and Mistral: config.json to spec, and the names of their tensors."""

from __future__ import annotations

from typing import Final

from model_executor.models.config import ConfigFile
from model_executor.models.fields import activation, check_head_counts, check_plain, checkpoint_dtype, read_window
from model_executor.models.registry import Family, architecture_of
from model_executor.models.rope import read_rope
from model_executor.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
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
    heads = config.count("num_attention_heads")
    return _read(
        config,
        kv_heads=config.count("num_key_value_heads", heads),
        max_position=config.count("max_position_embeddings", 2048),
        window=read_window(config, None, honoured=False),
        attention_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def _read_mistral(config: ConfigFile) -> ModelSpec:
    for field in ("attention_bias", "mlp_bias"):
        if config.flag(field, default=False):
            raise config.refuse(field, "MistralForCausalLM has no biases")
    heads = config.count("num_attention_heads")
    # transformers' defaults differ for an absent key and for null.
    kv_default = heads if "num_key_value_heads" in config.fields else 8
    window_default = None if "sliding_window" in config.fields else 4096
    return _read(
        config,
        kv_heads=config.count("num_key_value_heads", kv_default),
        max_position=config.count("max_position_embeddings", 131072),
        window=read_window(config, window_default, honoured=True),
        attention_bias=False,
        mlp_bias=False,
    )


def _read(
    config: ConfigFile,
    *,
    kv_heads: int,
    max_position: int,
    window: int | None,
    attention_bias: bool,
    mlp_bias: bool,
) -> ModelSpec:
    check_plain(config)
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    head_dim = config.count("head_dim", hidden // heads)
    check_head_counts(config, heads, kv_heads)
    rope = read_rope(config, head_dim, max_position)
    norm = NormSpec(config.number("rms_norm_eps", 1e-6))
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        window=window,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )
    mlp = MlpSpec(config.count("intermediate_size"), activation(config), mlp_bias)
    return ModelSpec(
        architecture=architecture_of(config),
        hidden_size=hidden,
        vocab_size=config.count("vocab_size"),
        max_model_len=rope.reach,
        tie=config.flag("tie_word_embeddings", default=False),
        norm=norm,
        dtype=checkpoint_dtype(config),
        layers=tuple(LayerSpec(s, attention, mlp, norm) for s in range(config.count("num_hidden_layers"))),
        mtp_layers=config.count("num_nextn_predict_layers", 0, least=0),
    )
