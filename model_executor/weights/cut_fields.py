"""Which fields of a config.json are bound to blocks, and how: the data that weights/cut_config.py works with.

A field that is in no table stays as it is, unless it looks like one value for each block: then the cut is refused, for
nobody knows what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

DEPTH: Final = "num_hidden_layers"
# Other names of the depth; they are changed only where they agree with it.
DEPTH_ALIASES: Final = ("n_layer", "n_layers", "num_layers")

# A list (or a string) with one entry for each block. A value that is no list belongs to all blocks.
PER_BLOCK: Final = frozenset({
    *("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "attention_types", "block_types"),
    *("no_rope_layers", "hybrid_override_pattern", "hybrid_layer_pattern", "attention_pattern", "block_configs"),
    *("moe_layer_freq", "moe_layer_pattern", "sliding_window", "sliding_windows", "sliding_window_pattern"),
    *("intermediate_size", "ffn_hidden_size", "ffn_multipliers", "num_attention_heads", "num_key_value_heads"),
    *("num_query_heads", "num_kv_heads", "head_dims", "num_experts_per_layer", "intermediate_sizes"),
    *("num_attention_heads_per_layer", "num_key_value_heads_per_layer", "activation_sparsity_pattern"),
    *("swiglu_limits", "swiglu_limits_shared", "yarn_only_types", "use_rope_layers", "attn_window_sizes"),
})  # fmt: skip

# A list of block indices.
INDEX_LISTS: Final = frozenset({
    *("mlp_only_layers", "moe_layers", "cross_attention_layers", "full_attn_idxs", "global_attn_idx"),
    *("moe_layer_indices", "attn_layer_indices", "full_attention_layers", "global_attention_layers"),
    *("kv_reuse_layers", "dense_layers"),
})  # fmt: skip
# The same as text: "3,4,5".
INDEX_TEXTS: Final = frozenset({"moe_layers_enum"})

# How many prediction blocks (MTP) follow the last block, and lists with one entry for each of them.
PREDICTION_COUNTS: Final = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
PREDICTION_LISTS: Final = ("mtp_layer_types",)

# Lists and objects that may be as long as the model is deep without being bound to blocks.
UNBOUND: Final = frozenset({
    *("architectures", "auto_map", "eos_token_id", "bos_token_id", "pad_token_id", "suppress_tokens"),
    *("begin_suppress_tokens", "bad_words_ids", "forced_decoder_ids", "id2label", "label2id"),
    *("keys_to_ignore_at_inference", "task_specific_params", "pruned_heads", "rope_scaling", "rope_parameters"),
    *("quantization_config", "compression_config"),
})  # fmt: skip

# Fields whose meaning depends on the depth as a number, with the values that make no difference.
DEPTH_BOUND: Final[Mapping[str, tuple[Any, ...]]] = {
    "scale_depth": (None, 1),
    "depth_scale": (None, 1),
    "use_mup": (None, False),
    "layernorm_scaling": (None, False),
    "num_layers_per_block": (None, 1),
}


class Periodic(Struct, frozen=True):
    """A rule that tells a block's kind from its index and a period; a list of kinds says the same explicitly.

    Attributes:
        field: the period.
        explicit: the list of kinds; where it stands, it goes before the rule.
        kind: entry of that list for a period and an index.
        implied: the period of models that do not write it, by model_type.
    """

    field: str
    explicit: str
    kind: Callable[[int, int], Any]
    implied: Mapping[str, int] = {}


def _sliding_but_last(period: int, index: int) -> str:
    return "sliding_attention" if (index + 1) % period else "full_attention"


def _linear_but_last(period: int, index: int) -> str:
    return "linear_attention" if (index + 1) % period else "full_attention"


def _rotated_but_last(period: int, index: int) -> int:
    return int((index + 1) % period != 0)


PERIODIC: Final = (
    Periodic("sliding_window_pattern", "layer_types", _sliding_but_last, {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}),
    Periodic("full_attention_interval", "layer_types", _linear_but_last, {"qwen3_next": 4}),
    Periodic("no_rope_layer_interval", "no_rope_layers", _rotated_but_last, {"smollm3": 4}),
)

# Rules that have no explicit form: the new indices must obey the old rule, or the cut is refused. The test tells the
# kind of a block from the rule's value, the whole configuration and an index.
FIXED: Final[Mapping[str, Callable[[Any, Mapping[str, Any], int], Any]]] = {
    "attn_layer_period": lambda period, config, index: index % period == config.get("attn_layer_offset", 0),
    "expert_layer_period": lambda period, config, index: index % period == config.get("expert_layer_offset", 0),
    "global_attn_every_n_layers": lambda period, _, index: index % period == 0,
    "cross_attention_interval": lambda period, _, index: index % period == 0,
    "interleave_moe_layer_step": lambda period, _, index: (index + 1) % period == 0,
    "moe_every_n_layers": lambda period, _, index: (index + 1) % period == 0,
    "hybrid_block_period": lambda period, _, index: index % period,
}
# With an explicit list in place, the rule is not asked.
FIXED_UNLESS: Final[Mapping[str, str]] = {"interleave_moe_layer_step": "moe_layers"}

# Values that transformers takes for an absent field, by model_type.
IMPLIED: Final[Mapping[tuple[str, str], int]] = {
    ("deepseek_v3", "first_k_dense_replace"): 3,
    ("qwen2", "max_window_layers"): 28,
    ("qwen3", "max_window_layers"): 28,
    ("qwen2_moe", "max_window_layers"): 28,
}
