"""Fields of config.json that families with experts share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from model_executor.models.config import ConfigFile
from model_executor.models.fields import OFF, ONE, PLAIN_VALUES, check_plain
from model_executor.models.spec import RoutingSpec

# Fields with which some family changes its experts or which blocks have them, and the values that change nothing.
PLAIN_EXPERTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "decoder_sparse_step": ONE,
    "mlp_layer_types": OFF,
    "mlp_only_layers": OFF,
    "moe_layer_freq": ONE,
    "n_group": (*OFF, 1),
    "n_shared_experts": OFF,
    "num_shared_experts": OFF,
    "routed_scaling_factor": ONE,
    "scoring_func": (None, "softmax"),
    "shared_expert_intermediate_size": OFF,
    "topk_group": (*OFF, 1),
    "topk_method": (None, "greedy"),
}
COUNT_FIELDS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def check_experts(config: ConfigFile, honoured: Collection[str]) -> None:
    """Refuse a value that would change the maths of a decoder with experts.

    Args:
        config: the whole config.json.
        honoured: fields that the family computes with.

    Raises:
        ConfigRefused: naming the field.
    """
    check_plain(config, honoured, {**PLAIN_VALUES, **PLAIN_EXPERTS})


def count_experts(config: ConfigFile, default: int, *, least: int = 1) -> int:
    """The number of experts; transformers takes it under the name of either generation.

    Raises:
        ConfigRefused: two names contradict each other.
    """
    given = {field: config.count(field, least=least) for field in COUNT_FIELDS if field in config}
    for field, value in given.items():
        if value != min(given.values()):
            raise config.refuse(field, f"contradicts {min(given, key=lambda name: given[name])}")
    return min(given.values(), default=default)


def check_routing(config: ConfigFile, routing: RoutingSpec) -> RoutingSpec:
    """The same routing.

    Raises:
        ConfigRefused: there are not enough experts, or groups, to choose from.
    """
    if routing.num_experts % routing.groups:
        raise config.refuse("n_group", f"must divide the number of experts, {routing.num_experts}")
    if routing.top_groups > routing.groups:
        raise config.refuse("topk_group", f"at most n_group, {routing.groups}")
    size = routing.num_experts // routing.groups
    if routing.groups > 1 and routing.group_score == "best_two" and size < 2:
        raise config.refuse("n_group", "groups of at least two experts are needed")
    if routing.top_k > routing.top_groups * size:
        raise config.refuse("num_experts_per_tok", f"at most {routing.top_groups * size} experts can be chosen")
    return routing
