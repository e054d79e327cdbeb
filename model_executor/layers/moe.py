"""A feed-forward part made of experts, of which each token passes a few."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_executor.layers.attention import KernelChooser
from model_executor.layers.experts import ExpertWeights
from model_executor.layers.linear import frozen_parameter
from model_executor.layers.mlp import GatedMlp
from model_executor.layers.routing import Router, Routing
from model_executor.models.spec import MlpSpec


class Experts(nn.Module):
    """All experts of a layer.

    Args:
        num_experts: of the layer.
        spec: width and activation of an expert.
        hidden_size: width of input and output.
        choose: gives the kernel.
    """

    def __init__(self, num_experts: int, spec: MlpSpec, hidden_size: int, choose: KernelChooser) -> None:
        super().__init__()
        width = spec.intermediate_size
        self.gate_up = frozen_parameter((num_experts, hidden_size, 2 * width), choose.dtype, choose.device)
        self.down = frozen_parameter((num_experts, width, hidden_size), choose.dtype, choose.device)
        self.kernel = choose.experts(spec, hidden_size)

    def forward(self, hidden: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of each token's experts: hidden [T, hidden_size] to the same.

        Tokens are sorted by expert and put back by position, so the sum of a token runs in the order of its choice
        whatever the batch.
        """
        count, top_k = routing.experts.shape
        chosen, order = torch.sort(routing.experts.flatten(), stable=True)
        borders = torch.arange(self.down.shape[0], device=hidden.device)
        ends = torch.searchsorted(chosen, borders, right=True).to(torch.int32)
        computed = self.kernel.forward(hidden[order // top_k], ends, ExpertWeights(self.gate_up, self.down))
        out = torch.empty_like(computed)
        out[order] = computed
        weighted = out.view(count, top_k, -1) * routing.weights[..., None]
        return weighted.sum(1).to(hidden.dtype)


class MoeMlp(nn.Module):
    """Router, experts, and the part that every token passes besides, if there is one.

    Args:
        spec: of kind "moe".
        hidden_size: width of input and output.
        choose: gives the kernels.
    """

    def __init__(self, spec: MlpSpec, hidden_size: int, choose: KernelChooser) -> None:
        super().__init__()
        assert spec.moe is not None
        routing = spec.moe.routing
        self.router = Router(routing, hidden_size, choose.dtype, choose.device)
        self.experts = Experts(routing.num_experts, spec, hidden_size, choose)
        self.shared: GatedMlp | None = None
        if spec.moe.shared_size:
            shared = MlpSpec(spec.moe.shared_size, spec.activation, spec.bias)
            self.shared = GatedMlp(shared, hidden_size, choose)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        out: Tensor = self.experts(hidden, self.router(hidden))
        if self.shared is not None:
            out = out + self.shared(hidden)
        return out
