"""The feed-forward part of a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_executor.layers.activation import ACTIVATIONS
from model_executor.layers.linear import Linear
from model_executor.models.spec import MlpSpec


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one projection.

    Args:
        spec: width, activation, bias.
        hidden_size: width of input and output.
        dtype, device: of the weights.
    """

    def __init__(self, spec: MlpSpec, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        width = spec.intermediate_size
        self.gate_up = Linear(hidden_size, 2 * width, bias=spec.bias, dtype=dtype, device=device)
        self.down = Linear(width, hidden_size, bias=spec.bias, dtype=dtype, device=device)
        self.activate = ACTIVATIONS[spec.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        out: Tensor = self.down(self.activate(gate) * up)
        return out
