"""DeepSeek V2 and V3: config.json to spec, and the names of their tensors."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct, structs

from model_executor.models import llama
from model_executor.models.config import ConfigFile
from model_executor.models.expert_fields import check_experts, check_routing, count_experts
from model_executor.models.fields import activation, check_no_bias, make_spec
from model_executor.models.registry import Family, architecture_of
from model_executor.models.rope import magnitude, read_rope
from model_executor.models.spec import (
    AttentionSpec,
    LatentSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    RoutingSpec,
)
from model_executor.weights.parameters import NameTable

EXPERT: Final = "mlp.experts.{expert}."
SHARED: Final = "mlp.shared_experts."
NAMES: Final[NameTable] = structs.replace(
    llama.NAMES,
    parts={
        **llama.NAMES.parts,
        "attention.query.full": ("self_attn.q_proj",),
        "attention.query.down": ("self_attn.q_a_proj",),
        "attention.query.norm": ("self_attn.q_a_layernorm",),
        "attention.query.up": ("self_attn.q_b_proj",),
        "attention.down": ("self_attn.kv_a_proj_with_mqa",),
        "attention.norm": ("self_attn.kv_a_layernorm",),
        "attention.up": ("self_attn.kv_b_proj",),
        "mlp.router.scores": ("mlp.gate",),
        "mlp.router.correction": ("mlp.gate.e_score_correction_bias",),
        "mlp.experts.gate_up": (f"{EXPERT}gate_proj", f"{EXPERT}up_proj"),
        "mlp.experts.down": (f"{EXPERT}down_proj",),
        "mlp.shared.gate_up": (f"{SHARED}gate_proj", f"{SHARED}up_proj"),
        "mlp.shared.down": (f"{SHARED}down_proj",),
    },
)
LATENT_NORM: Final = NormSpec(1e-6)
"""Of the latents, whatever rms_norm_eps says of the other norms."""

HONOURED: Final = (
    "first_k_dense_replace",
    "kv_lora_rank",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "num_local_experts",
    "q_lora_rank",
    "rope_interleave",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
)


class Defaults(Struct, frozen=True):
    """transformers' values of absent fields."""

    max_position: int
    experts: int
    expert_width: int
    top_k: int | None
    shared: int
    dense_prefix: int
    scale: float


DEFAULTS2: Final = Defaults(2048, 64, 1407, None, 2, 0, 1.0)
DEFAULTS3: Final = Defaults(4096, 256, 2048, 8, 1, 3, 2.5)


def deepseek_v2() -> Family:
    """DeepseekV2ForCausalLM: latent attention; experts weighted by softmax."""
    return Family(read=_read_v2, names=NAMES)


def deepseek_v3() -> Family:
    """DeepseekV3ForCausalLM: latent attention; experts weighted by sigmoid and ranked with a bias."""
    return Family(read=_read_v3, names=NAMES)


def _read_v2(config: ConfigFile) -> ModelSpec:
    check_experts(config, HONOURED)
    _must_be(config, "scoring_func", "softmax")
    if config.flag("norm_topk_prob", default=False):
        reason = (
            "transformers computes DeepseekV2ForCausalLM without it, the models' own code with it: only false is sure"
        )
        raise config.refuse("norm_topk_prob", reason)
    if not config.flag("rope_interleave", default=True):
        raise config.refuse("rope_interleave", "the pairs of DeepseekV2ForCausalLM are always neighbours")
    method = config.string("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.refuse("topk_method", "known: greedy, group_limited_greedy")
    grouped = method == "group_limited_greedy"
    routing = RoutingSpec(
        num_experts=count_experts(config, DEFAULTS2.experts),
        top_k=config.count("num_experts_per_tok", DEFAULTS2.top_k),
        score="softmax",
        normalize=False,
        scale=config.number("routed_scaling_factor", DEFAULTS2.scale),
        groups=config.count("n_group") if grouped else 1,
        top_groups=config.count("topk_group") if grouped else 1,
        wide=True,
    )
    mlp_bias = config.flag("mlp_bias", default=False)
    return _read(config, DEFAULTS2, routing, interleaved=True, mlp_bias=mlp_bias)


def _read_v3(config: ConfigFile) -> ModelSpec:
    check_experts(config, HONOURED)
    _must_be(config, "scoring_func", "sigmoid")
    _must_be(config, "topk_method", "noaux_tc")
    check_no_bias(config, "mlp_bias")
    routing = RoutingSpec(
        num_experts=count_experts(config, DEFAULTS3.experts),
        top_k=config.count("num_experts_per_tok", DEFAULTS3.top_k),
        score="sigmoid",
        normalize=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", DEFAULTS3.scale),
        groups=config.count("n_group", 8),
        top_groups=config.count("topk_group", 4),
        group_score="best_two",
        correction=True,
        wide=True,
    )
    interleaved = config.flag("rope_interleave", default=True)
    return _read(config, DEFAULTS3, routing, interleaved=interleaved, mlp_bias=False)


def _read(
    config: ConfigFile, defaults: Defaults, routing: RoutingSpec, *, interleaved: bool, mlp_bias: bool
) -> ModelSpec:
    attention = _attention(config, defaults, interleaved=interleaved)
    mlps = _mlps(config, defaults, check_routing(config, routing), mlp_bias)
    spec = make_spec(config, [attention] * len(mlps), mlps, NormSpec(config.number("rms_norm_eps", 1e-6)))
    older = config.count("num_mtp_layers", 0, least=0)
    return spec if "num_nextn_predict_layers" in config else structs.replace(spec, mtp_layers=older)


def _attention(config: ConfigFile, defaults: Defaults, *, interleaved: bool) -> AttentionSpec:
    heads = config.count("num_attention_heads")
    if config.count("num_key_value_heads", heads) != heads:
        raise config.refuse("num_key_value_heads", f"latent attention has one for each of the {heads} query heads")
    nope, rope_dim = config.count("qk_nope_head_dim", 128), config.count("qk_rope_head_dim", 64)
    if config.count("qk_head_dim", nope + rope_dim) != nope + rope_dim:
        raise config.refuse("qk_head_dim", f"contradicts qk_nope_head_dim + qk_rope_head_dim, {nope + rope_dim}")
    rope = read_rope(config, rope_dim, config.count("max_position_embeddings", defaults.max_position))
    bias = config.flag("attention_bias", default=False)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rope_dim,
        scale=(nope + rope_dim) ** -0.5 * _scale_correction(config, rope),
        rope=rope,
        qkv_bias=bias,
        output_bias=bias,
        kind="mla",
        latent=LatentSpec(
            kv_rank=config.count("kv_lora_rank", 512),
            nope_dim=nope,
            rope_dim=rope_dim,
            value_dim=config.count("v_head_dim", 128),
            query_rank=config.optional_count("q_lora_rank") if "q_lora_rank" in config.fields else 1536,
            norm=LATENT_NORM,
            interleaved=interleaved,
        ),
    )


def _scale_correction(config: ConfigFile, rope: RopeSpec) -> float:
    """Yarn's factor on queries and keys stands in the scale of the scores here, so it counts twice."""
    section = config.section("rope_scaling") or config.section("rope_parameters")
    if section is None or rope.kind == "default":
        return 1.0
    all_dim = section.number("mscale_all_dim", 0.0)
    return magnitude(rope.factor, all_dim) ** 2 if all_dim else 1.0


def _mlps(config: ConfigFile, defaults: Defaults, routing: RoutingSpec, bias: bool) -> tuple[MlpSpec, ...]:
    """The feed-forward part of each block: a dense prefix, then experts in every moe_layer_freq-th block."""
    dense = MlpSpec(config.count("intermediate_size"), activation(config), bias)
    width = config.count("moe_intermediate_size", defaults.expert_width)
    absent = "n_shared_experts" not in config.fields
    shared = config.count("n_shared_experts", defaults.shared if absent else 0, least=0)
    sparse = MlpSpec(width, dense.activation, bias, kind="moe", moe=MoeSpec(routing, shared * width))
    first = config.count("first_k_dense_replace", defaults.dense_prefix, least=0)
    every = config.count("moe_layer_freq", 1)
    layers = config.count("num_hidden_layers")
    return tuple(sparse if s >= first and s % every == 0 else dense for s in range(layers))


def _must_be(config: ConfigFile, field: str, value: Literal["softmax", "sigmoid", "noaux_tc"]) -> None:
    if config.string(field, value) != value:
        raise config.refuse(field, f"{architecture_of(config)} is computed with {value}")
