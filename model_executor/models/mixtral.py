"""Mixtral: config.json to spec, and the names of its tensors."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from model_executor.models import llama
from model_executor.models.config import ConfigFile
from model_executor.models.expert_fields import check_experts, check_routing, count_experts
from model_executor.models.fields import activation, check_no_bias, make_spec, read_head_dim, read_heads, read_window
from model_executor.models.registry import Family
from model_executor.models.rope import read_rope
from model_executor.models.spec import AttentionSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RoutingSpec
from model_executor.weights.parameters import NameTable

EXPERT: Final = "block_sparse_moe.experts.{expert}."
NAMES: Final[NameTable] = structs.replace(
    llama.NAMES,
    parts={
        **llama.NAMES.parts,
        "mlp.router.scores": ("block_sparse_moe.gate",),
        "mlp.experts.gate_up": (f"{EXPERT}w1", f"{EXPERT}w3"),
        "mlp.experts.down": (f"{EXPERT}w2",),
    },
)
DEFAULT_THETA: Final = 1000000.0


def mixtral() -> Family:
    """MixtralForCausalLM: Mistral's attention; every block has experts, whose weights add up to one."""
    return Family(read=_read, names=NAMES)


def _read(config: ConfigFile) -> ModelSpec:
    check_experts(config, honoured=("num_experts", "num_local_experts"))
    check_no_bias(config, "attention_bias", "mlp_bias")
    attention = _attention(config)
    mlp = MlpSpec(config.count("intermediate_size"), activation(config), kind="moe", moe=MoeSpec(_routing(config)))
    layers = config.count("num_hidden_layers")
    return make_spec(config, [attention] * layers, [mlp] * layers, NormSpec(config.number("rms_norm_eps", 1e-5)))


def _attention(config: ConfigFile) -> AttentionSpec:
    heads, kv_heads = read_heads(config, 8)
    head_dim = read_head_dim(config, heads)
    with_theta = {**config.fields, "rope_theta": config.number("rope_theta", DEFAULT_THETA)}
    rope = read_rope(ConfigFile(config.path, with_theta), head_dim, config.count("max_position_embeddings", 131072))
    window = read_window(config, None, honoured=True)
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope, window)


def _routing(config: ConfigFile) -> RoutingSpec:
    if not config.flag("norm_topk_prob", default=True):
        raise config.refuse("norm_topk_prob", "MixtralForCausalLM divides the weights by their sum")
    routing = RoutingSpec(
        num_experts=count_experts(config, 8),
        top_k=config.count("num_experts_per_tok", 2),
        score="softmax",
        normalize=True,
    )
    return check_routing(config, routing)
