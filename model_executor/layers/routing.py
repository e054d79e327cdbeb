"""The choice of experts: each token's best few, and what each of them weighs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model_executor.layers.linear import Linear, frozen_parameter
from model_executor.models.spec import RoutingSpec

SMALLEST_SUM = 1e-20
"""Added to the sum of sigmoid weights, which may all underflow."""


@dataclass(frozen=True)
class Routing:
    """The choice of T tokens.

    Attributes:
        experts: int64 [T, top_k]; a token names no expert twice.
        weights: float32 [T, top_k], of the same experts.
    """

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Scores every expert for every token and chooses.

    Args:
        spec: of the choice.
        hidden_size: width of the input.
        dtype, device: of the weight; a wide router's is float32.
    """

    def __init__(self, spec: RoutingSpec, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        kept = torch.float32 if spec.wide else dtype
        self.scores = Linear(hidden_size, spec.num_experts, bias=False, dtype=kept, device=device)
        self.correction = frozen_parameter((spec.num_experts,), torch.float32, device) if spec.correction else None

    def forward(self, hidden: Tensor) -> Routing:
        """hidden [T, hidden_size]."""
        logits = self.scores(hidden.float() if self.spec.wide else hidden)
        return choose(logits.float(), self.spec, self.correction)


def choose(logits: Tensor, spec: RoutingSpec, correction: Tensor | None = None) -> Routing:
    """The choice for the router's output.

    Args:
        logits: float32 [T, num_experts].
        spec: of the choice.
        correction: float32 [num_experts], for the ranking only.
    """
    scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
    ranks = scores if correction is None else scores + correction
    if spec.groups > 1:
        ranks = _best_groups(ranks, spec)
    experts = ranks.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return Routing(experts, weights * spec.scale)


def _best_groups(ranks: Tensor, spec: RoutingSpec) -> Tensor:
    """The same ranks in a token's best groups, minus infinity elsewhere."""
    grouped = ranks.view(*ranks.shape[:-1], spec.groups, -1)
    best = 1 if spec.group_score == "best" else 2
    chosen = grouped.topk(best, dim=-1).values.sum(-1).topk(spec.top_groups, dim=-1).indices
    kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=ranks.device).scatter_(-1, chosen, value=True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
