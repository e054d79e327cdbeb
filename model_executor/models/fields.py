"""Fields of config.json that many families share, and the check for those that would change the maths unseen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from model_executor.models.config import ConfigFile
from model_executor.models.registry import architecture_of
from model_executor.models.spec import Activation, AttentionSpec, Dtype, LayerSpec, MlpSpec, ModelSpec, NormSpec

ACTIVATION_NAMES: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

DTYPE_NAMES: Final[Mapping[str, Dtype]] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}

OFF: Final[tuple[Any, ...]] = (None, False, 0, [], {})
ONE: Final[tuple[Any, ...]] = (None, 1)

QUANTIZED: Final = "quantized weights are not served; tercet plan and tercet cut take them as they lie"
QUANTIZATION: Final = ("quantization_config", "compression_config")

# Fields with which other families change what a decoder block computes, and the values that change nothing. A plain
# decoder refuses any other value. Fields that are in no table describe training, generation or tooling.
PLAIN_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(QUANTIZATION, OFF),
    # position and attention
    "alibi": OFF,
    "attention_chunk_size": OFF,
    "attention_k_eq_v": OFF,
    "attention_multiplier": (None,),
    "attn_logit_softcapping": OFF,
    "attn_scale": OFF,
    "attn_temperature_tuning": OFF,
    "clip_qkv": OFF,
    "dual_chunk_attention_config": OFF,
    "is_causal": (None, True),
    "llama_4_scaling": OFF,
    "no_rope_layer_interval": OFF,
    "no_rope_layers": OFF,
    "num_kv_shared_layers": OFF,
    "kv_lora_rank": OFF,
    "q_lora_rank": OFF,
    "qk_layernorm": OFF,
    "qk_norm": OFF,
    "qkv_bias": OFF,
    "query_pre_attn_scalar": (None,),
    "partial_rotary_factor": ONE,
    "position_embedding_type": (None, "rope", "rotary", "absolute"),
    "rope_interleave": OFF,
    "rope_interleaved": OFF,
    "rope_local_base_freq": (None,),
    "rotary_pct": ONE,
    "sliding_window_pattern": OFF,
    "use_alibi": OFF,
    "use_bidirectional_attention": OFF,
    "use_mrope": OFF,
    "use_qk_norm": OFF,
    "use_qkv_bias": OFF,
    # scales
    "dim_model_base": (None,),
    "embedding_multiplier": ONE,
    "final_logit_softcapping": OFF,
    "logit_scale": ONE,
    "logits_scaling": ONE,
    "lm_head_multiplier": ONE,
    "residual_multiplier": ONE,
    "scale_depth": ONE,
    "scale_emb": ONE,
    "use_mup": OFF,
    # shape of the block
    "add_cross_attention": OFF,
    "cross_attention_layers": OFF,
    "first_k_dense_replace": OFF,
    "moe_intermediate_size": OFF,
    "n_routed_experts": OFF,
    "norm_type": (None, "rms", "rmsnorm", "rms_norm"),
    "num_experts": OFF,
    "num_local_experts": OFF,
    "parallel_attn": OFF,
    "use_parallel_residual": OFF,
    # other inputs than tokens
    "audio_config": OFF,
    "text_config": OFF,
    "vision_config": OFF,
}


def check_plain(
    config: ConfigFile, honoured: Collection[str] = (), plain: Mapping[str, tuple[Any, ...]] = PLAIN_VALUES
) -> None:
    """Refuse a value that would change the maths of a plain decoder.

    Args:
        config: the whole config.json.
        honoured: fields that the family computes with.
        plain: of each field the values that change nothing.

    Raises:
        ConfigRefused: naming the field.
    """
    for field, neutral in plain.items():
        if field not in honoured and config.fields.get(field) not in neutral:
            reason = f"{architecture_of(config)} is computed without it here"
            raise config.refuse(field, QUANTIZED if field in QUANTIZATION else reason)


def check_no_bias(config: ConfigFile, *fields: str) -> None:
    """Refuse biases that the family does not have.

    Raises:
        ConfigRefused: naming the field.
    """
    for field in fields:
        if config.flag(field, default=False):
            raise config.refuse(field, f"{architecture_of(config)} has none")


def read_heads(config: ConfigFile, kv_default: int | None = None) -> tuple[int, int]:
    """Query heads and key/value heads.

    Args:
        config: the whole config.json.
        kv_default: for an absent `num_key_value_heads`; null, or None here, stands for as many as query heads.

    Raises:
        ConfigRefused: heads that do not divide.
    """
    heads = config.count("num_attention_heads")
    absent = "num_key_value_heads" not in config.fields
    kv_heads = config.count("num_key_value_heads", kv_default if absent and kv_default is not None else heads)
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"must divide num_attention_heads, {heads}")
    return heads, kv_heads


def read_head_dim(config: ConfigFile, heads: int) -> int:
    """Elements of a head; where the field is absent, hidden_size shared out among the heads.

    Raises:
        ConfigRefused: heads that do not divide hidden_size.
    """
    hidden = config.count("hidden_size")
    if "head_dim" not in config and hidden % heads:
        raise config.refuse("num_attention_heads", f"must divide hidden_size, {hidden}, as head_dim is not given")
    return config.count("head_dim", hidden // heads)


def make_spec(
    config: ConfigFile,
    attention: Sequence[AttentionSpec],
    mlps: Sequence[MlpSpec],
    norm: NormSpec,
    *,
    tie: bool = False,
    sandwich: bool = False,
) -> ModelSpec:
    """The model around its blocks.

    Args:
        config: the whole config.json.
        attention, mlps: of each block; at least one.
        norm: of all places.
        tie: the family's value of an absent `tie_word_embeddings`.
        sandwich: see LayerSpec.

    Raises:
        ConfigRefused: naming the field.
    """
    parts = enumerate(zip(attention, mlps, strict=True))
    return ModelSpec(
        architecture=architecture_of(config),
        hidden_size=config.count("hidden_size"),
        vocab_size=config.count("vocab_size"),
        max_model_len=min(each.rope.reach for each in attention if each.rope is not None),
        tie=config.flag("tie_word_embeddings", default=tie),
        norm=norm,
        dtype=checkpoint_dtype(config),
        layers=tuple(LayerSpec(source, part, mlp, norm, sandwich=sandwich) for source, (part, mlp) in parts),
        mtp_layers=config.count("num_nextn_predict_layers", 0, least=0),
    )


def activation(config: ConfigFile, field: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation that a field names.

    Raises:
        ConfigRefused: an unknown one.
    """
    name = config.string(field, default)
    if name not in ACTIVATION_NAMES:
        raise config.refuse(field, f"known: {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def checkpoint_dtype(config: ConfigFile) -> Dtype | None:
    """The dtype that `dtype` names, or `torch_dtype`, its older name.

    Raises:
        ConfigRefused: an unknown one.
    """
    field = "dtype" if "dtype" in config else "torch_dtype"
    name = config.string(field, "auto").removeprefix("torch.")
    if name == "auto":
        return None
    if name not in DTYPE_NAMES:
        raise config.refuse(field, f"known: {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]


def read_window(config: ConfigFile, default: int | None, *, honoured: bool) -> int | None:
    """The sliding window of a family whose blocks all have one, or all have none.

    Args:
        config: the whole config.json.
        default: for an absent `sliding_window`.
        honoured: whether the family has windows at all.

    Raises:
        ConfigRefused: a window where there can be none, or fields that contradict each other.
    """
    window = config.count("sliding_window", 0) or default
    used = config.flag("use_sliding_window", default=window is not None)
    if window is not None and honoured and not used:
        raise config.refuse("use_sliding_window", f"contradicts sliding_window, {window}")
    if window is not None and not honoured:
        if used:
            raise config.refuse("sliding_window", "this architecture has no window")
        window = None
    _check_layer_types(config, window)
    return window


def _check_layer_types(config: ConfigFile, window: int | None) -> None:
    types = config.strings("layer_types")
    layers = config.count("num_hidden_layers")
    if not types:
        return
    if len(types) != layers:
        raise config.refuse("layer_types", f"{len(types)} entries for num_hidden_layers = {layers}")
    expected = "full_attention" if window is None else "sliding_attention"
    if set(types) != {expected}:
        raise config.refuse("layer_types", f"must all be {expected}, as sliding_window is {window}")
