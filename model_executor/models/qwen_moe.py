"""Qwen 3 with experts: config.json to spec, and the names of its tensors."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from model_executor.models.config import ConfigFile
from model_executor.models.expert_fields import check_experts, check_routing, count_experts
from model_executor.models.fields import activation, check_no_bias, make_spec, read_head_dim, read_heads
from model_executor.models.layer_types import DEFAULT_WINDOW, FULL, SLIDING, read_layer_types
from model_executor.models.qwen import NAMES3, read_norm
from model_executor.models.registry import Family
from model_executor.models.rope import read_rope
from model_executor.models.spec import AttentionSpec, MlpSpec, ModelSpec, MoeSpec, RoutingSpec
from model_executor.weights.parameters import NameTable

EXPERT: Final = "mlp.experts.{expert}."
NAMES: Final[NameTable] = structs.replace(
    NAMES3,
    parts={
        **NAMES3.parts,
        "mlp.router.scores": ("mlp.gate",),
        "mlp.experts.gate_up": (f"{EXPERT}gate_proj", f"{EXPERT}up_proj"),
        "mlp.experts.down": (f"{EXPERT}down_proj",),
    },
)
HONOURED: Final = (
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "mlp_only_layers",
    "decoder_sparse_step",
)


def qwen3_moe() -> Family:
    """Qwen3MoeForCausalLM: Qwen 3's attention; some blocks have experts, the others are dense."""
    return Family(read=_read, names=NAMES)


def _read(config: ConfigFile) -> ModelSpec:
    check_experts(config, HONOURED)
    check_no_bias(config, "mlp_bias")
    mlps = _mlps(config)
    return make_spec(config, [_attention(config)] * len(mlps), mlps, read_norm(config))


def _mlps(config: ConfigFile) -> tuple[MlpSpec, ...]:
    """The feed-forward part of each block."""
    layers, experts = config.count("num_hidden_layers"), count_experts(config, 128, least=0)
    dense = MlpSpec(config.count("intermediate_size", 6144), activation(config))
    if experts == 0:
        return (dense,) * layers
    routing = RoutingSpec(
        num_experts=experts,
        top_k=config.count("num_experts_per_tok", 8),
        score="softmax",
        normalize=config.flag("norm_topk_prob", default=False),
    )
    width = config.count("moe_intermediate_size", 768)
    sparse = MlpSpec(width, dense.activation, kind="moe", moe=MoeSpec(check_routing(config, routing)))
    step, only_dense = config.count("decoder_sparse_step", 1), set(config.indices("mlp_only_layers"))
    return tuple(dense if s in only_dense or (s + 1) % step else sparse for s in range(layers))


def _attention(config: ConfigFile) -> AttentionSpec:
    heads, kv_heads = read_heads(config, 4)
    head_dim = read_head_dim(config, heads)
    bias = config.flag("attention_bias", default=False)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, config.count("max_position_embeddings", 32768)),
        window=_window(config),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=read_norm(config),
    )


def _window(config: ConfigFile) -> int | None:
    """With `use_sliding_window` all blocks slide, whatever `max_window_layers` says, as in transformers."""
    window = None
    if config.flag("use_sliding_window", default=False):
        absent = "sliding_window" not in config.fields
        window = DEFAULT_WINDOW if absent else config.optional_count("sliding_window")
    slides = (window is not None,) * config.count("num_hidden_layers")
    expected = FULL if window is None else SLIDING
    if set(read_layer_types(config, slides)) != {expected}:
        raise config.refuse("layer_types", f"must all be {expected}, as the blocks have one window or none")
    return window
