"""Mixtral: config.json to spec, and the names of its tensors."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from model_executor.models import llama
from model_executor.models.config import ConfigFile
from model_executor.models.expert_fields import check_experts, check_routing, count_experts
from model_executor.models.fields import activation, check_head_counts, checkpoint_dtype, read_window
from model_executor.models.registry import Family, architecture_of
from model_executor.models.rope import read_rope
from model_executor.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RoutingSpec
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
    for field in ("attention_bias", "mlp_bias"):
        if config.flag(field, default=False):
            raise config.refuse(field, "MixtralForCausalLM has no biases")
    attention = _attention(config)
    norm = NormSpec(config.number("rms_norm_eps", 1e-5))
    mlp = MlpSpec(config.count("intermediate_size"), activation(config), kind="moe", moe=MoeSpec(_routing(config)))
    assert attention.rope is not None
    return ModelSpec(
        architecture=architecture_of(config),
        hidden_size=config.count("hidden_size"),
        vocab_size=config.count("vocab_size"),
        max_model_len=attention.rope.reach,
        tie=config.flag("tie_word_embeddings", default=False),
        norm=norm,
        dtype=checkpoint_dtype(config),
        layers=tuple(LayerSpec(s, attention, mlp, norm) for s in range(config.count("num_hidden_layers"))),
        mtp_layers=config.count("num_nextn_predict_layers", 0, least=0),
    )


def _attention(config: ConfigFile) -> AttentionSpec:
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    # transformers' defaults differ for an absent key and for null.
    kv_heads = config.count("num_key_value_heads", heads if "num_key_value_heads" in config.fields else 8)
    check_head_counts(config, heads, kv_heads)
    head_dim = config.count("head_dim", hidden // heads)
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
