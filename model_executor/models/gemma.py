"""Gemma 2 and the text part of Gemma 3: config.json to spec, and the names of their tensors."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from model_executor.models import llama
from model_executor.models.config import ConfigFile
from model_executor.models.fields import (
    ACTIVATION_NAMES,
    activation,
    check_no_bias,
    check_plain,
    checkpoint_dtype,
    make_spec,
)
from model_executor.models.layer_types import (
    FULL,
    SLIDING,
    read_layer_types,
    read_layer_window,
    slides_by_period,
)
from model_executor.models.qwen import QK_NORM
from model_executor.models.registry import Family, architecture_of
from model_executor.models.rope import read_layer_ropes, read_rope
from model_executor.models.spec import Activation, AttentionSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec
from model_executor.weights.parameters import IgnoreRule, NameTable

NAMES2: Final[NameTable] = structs.replace(
    llama.NAMES,
    parts={
        **llama.NAMES.parts,
        "attention_out_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_out_norm": ("post_feedforward_layernorm",),
    },
)
NAMES3: Final[NameTable] = structs.replace(NAMES2, parts={**NAMES2.parts, **QK_NORM})

VISION: Final = IgnoreRule(
    r"(model\.)?(vision_tower|multi_modal_projector)\..*", "the part for images; text alone is served", other_part=True
)


def _inside(prefix: str, head: str) -> NameTable:
    """The names of Gemma 3 within a checkpoint that has a part for images too."""
    return structs.replace(
        NAMES3,
        embedding=f"{prefix}embed_tokens.weight",
        norm=f"{prefix}norm.weight",
        head=head,
        block=f"{prefix}layers.{{source}}.",
        ignored=(VISION,),
    )


# As published and saved by transformers 5, and as saved by late versions of transformers 4.
NAMES3_CONDITIONAL: Final[NameTable] = structs.replace(
    _inside("language_model.model.", "language_model.lm_head.weight"),
    others=(_inside("model.language_model.", "lm_head.weight"),),
)

HONOURED2: Final = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
HONOURED3: Final = (
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "sliding_window_pattern",
)

# transformers' values of absent fields.
DEFAULT_KV_HEADS: Final = 4
DEFAULT_HEAD_DIM: Final = 256
DEFAULT_ACTIVATION: Final = "gelu_pytorch_tanh"
DEFAULT_MAX_POSITION2: Final = 8192
DEFAULT_MAX_POSITION3: Final = 131072
DEFAULT_PERIOD3: Final = 6
PERIOD2: Final = 2
TEXT_ARCHITECTURE: Final = "Gemma3ForCausalLM"
# Likewise, of a text_config, which leaves out what is no different.
DEFAULTS_TEXT: Final = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "model_type": "gemma3_text",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "sliding_window": 4096,
    "vocab_size": 262208,
}


def gemma2() -> Family:
    """Gemma2ForCausalLM: every second block has a window; soft caps on scores and logits."""
    return Family(read=_read_gemma2, names=NAMES2)


def gemma3() -> Family:
    """Gemma3ForCausalLM: most blocks have a window and a rotation of their own; a norm on queries and keys."""
    return Family(read=_read_gemma3, names=NAMES3)


def gemma3_conditional() -> Family:
    """Gemma3ForConditionalGeneration: Gemma 3 with a part for images, of which the text part runs."""
    return Family(read=_read_conditional, names=NAMES3_CONDITIONAL, section="text_config")


def _read_gemma2(config: ConfigFile) -> ModelSpec:
    check_plain(config, HONOURED2)
    rope = read_rope(config, _head_dim(config), config.count("max_position_embeddings", DEFAULT_MAX_POSITION2))
    plain = structs.replace(_attention(config), soft_cap=_cap(config, "attn_logit_softcapping", 50.0))
    attention = _by_layer(config, plain, {FULL: rope, SLIDING: rope}, period=PERIOD2)
    return _read(config, attention, final_soft_cap=_cap(config, "final_logit_softcapping", 30.0))


def _read_gemma3(config: ConfigFile) -> ModelSpec:
    check_plain(config, HONOURED3)
    ropes = read_layer_ropes(config, _head_dim(config), config.count("max_position_embeddings", DEFAULT_MAX_POSITION3))
    plain = structs.replace(_attention(config), qk_norm=_norm(config))
    period = config.count("sliding_window_pattern", DEFAULT_PERIOD3)
    attention = _by_layer(config, plain, ropes, period=period)
    return _read(config, attention, final_soft_cap=_cap(config, "final_logit_softcapping", None))


def _read_conditional(config: ConfigFile) -> ModelSpec:
    text = config.section("text_config")
    if text is None:
        raise config.refuse("text_config", "is required")
    check_plain(config, ("text_config", "vision_config"))
    own = {name: value for name, value in text.fields.items() if value is not None and name != "architectures"}
    spec = _read_gemma3(ConfigFile(text.path, {**DEFAULTS_TEXT, **own}, text.prefix))
    if spec.architecture != TEXT_ARCHITECTURE:
        raise text.refuse("model_type", f"{architecture_of(config)} has a text part of type gemma3_text")
    if spec.final_soft_cap is not None:
        raise text.refuse("final_logit_softcapping", f"{architecture_of(config)} is computed without it")
    if config.flag("tie_word_embeddings", default=True) != spec.tie:
        raise text.refuse("tie_word_embeddings", "contradicts tie_word_embeddings of the whole model")
    return structs.replace(spec, architecture=architecture_of(config), dtype=checkpoint_dtype(config) or spec.dtype)


def _attention(config: ConfigFile) -> AttentionSpec:
    """What the attention of all blocks has in common."""
    heads, kv_heads = config.count("num_attention_heads"), config.count("num_key_value_heads", DEFAULT_KV_HEADS)
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"must divide num_attention_heads, {heads}")
    scalar = config.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise config.refuse("query_pre_attn_scalar", "must be above 0")
    bias = config.flag("attention_bias", default=False)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config),
        scale=scalar**-0.5,
        rope=None,
        qkv_bias=bias,
        output_bias=bias,
    )


def _by_layer(
    config: ConfigFile, plain: AttentionSpec, ropes: dict[str, RopeSpec], *, period: int
) -> tuple[AttentionSpec, ...]:
    types = read_layer_types(config, slides_by_period(config, period))
    window = read_layer_window(config, types, used=True)
    kinds = {
        FULL: structs.replace(plain, rope=ropes[FULL]),
        SLIDING: structs.replace(plain, rope=ropes[SLIDING], window=window),
    }
    return tuple(kinds[kind] for kind in types)


def _read(config: ConfigFile, attention: tuple[AttentionSpec, ...], *, final_soft_cap: float | None) -> ModelSpec:
    check_no_bias(config, "mlp_bias")
    mlp = MlpSpec(config.count("intermediate_size"), _activation(config))
    spec = make_spec(config, attention, [mlp] * len(attention), _norm(config), tie=True, sandwich=True)
    return structs.replace(spec, embedding_scale=spec.hidden_size**0.5, final_soft_cap=final_soft_cap)


def _activation(config: ConfigFile) -> Activation:
    """`hidden_activation` decides. `hidden_act` alone is no field of these families, so it may only agree."""
    used = activation(config, "hidden_activation", DEFAULT_ACTIVATION)
    other = config.string("hidden_act", DEFAULT_ACTIVATION)
    if "hidden_activation" not in config and ACTIVATION_NAMES.get(other) != used:
        raise config.refuse("hidden_act", f"hidden_activation decides here, and stands for {DEFAULT_ACTIVATION}")
    return used


def _cap(config: ConfigFile, field: str, default: float | None) -> float | None:
    """A soft cap; null means none, whatever an absent field stands for."""
    if field not in config:
        return None if field in config.fields else default
    cap = config.number(field)
    if cap <= 0:
        raise config.refuse(field, "must be above 0, or null")
    return cap


def _head_dim(config: ConfigFile) -> int:
    return config.count("head_dim", DEFAULT_HEAD_DIM)


def _norm(config: ConfigFile) -> NormSpec:
    return NormSpec(config.number("rms_norm_eps", 1e-6), offset=True)
