"""The feed-forward part of a block."""

from __future__ import annotations

from torch import Tensor, nn

from model_executor.layers.attention import KernelChooser
from model_executor.models.spec import MlpSpec


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one projection.

    Args:
        spec: width, activation, bias.
        hidden_size: width of input and output.
        choose: makes the projections.
    """

    def __init__(self, spec: MlpSpec, hidden_size: int, choose: KernelChooser) -> None:
        super().__init__()
        width = spec.intermediate_size
        self.gate_up = choose.linear(hidden_size, 2 * width, bias=spec.bias, gate=spec.activation)
        self.down = choose.linear(width, hidden_size, bias=spec.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        out: Tensor = self.down(self.gate_up(hidden))
        return out
