"""Operator "experts": each expert's feed-forward part over the tokens that chose it, and over no other.

The tokens come sorted by expert. Both kernels are grouped matrix products; they differ in where the borders of the
groups are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.layers.activation import ACTIVATIONS
from model_executor.layers.operator import OperatorSpec
from model_executor.models.spec import Activation


@dataclass(frozen=True)
class ExpertsProblem:
    """The experts of one layer class.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of tokens and weights.
        num_experts: of the layer.
        hidden_size: width of input and output.
        intermediate_size: width of an expert.
        activation: on its gate.
    """

    device: str
    dtype: torch.dtype
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation

    def __str__(self) -> str:
        return (
            f"{self.device} {str(self.dtype).removeprefix('torch.')} {self.num_experts} experts of"
            f" {self.hidden_size} to {self.intermediate_size}, {self.activation}"
        )


@dataclass(frozen=True)
class ExpertWeights:
    """All experts of a layer, each stored (in, out).

    Attributes:
        gate_up: [experts, hidden_size, 2 * intermediate_size].
        down: [experts, intermediate_size, hidden_size].
    """

    gate_up: Tensor
    down: Tensor


class ExpertsKernel(Protocol):
    """Operator "experts"."""

    reads_host: bool
    """Whether it waits for the device, so that no graph can hold it."""

    def forward(self, tokens: Tensor, ends: Tensor, weights: ExpertWeights) -> Tensor:
        """down(activation(gate(x)) * up(x)) of each token's expert.

        Args:
            tokens: [N, hidden_size], sorted by expert.
            ends: int32 [experts]: tokens ends[e - 1] .. ends[e] - 1 are expert e's; the last is N.
            weights: of the layer.
        """
        ...


class ExpertLoop:
    """One product for each expert that has tokens.

    Args:
        problem: what to compute.
    """

    reads_host = True

    def __init__(self, problem: ExpertsProblem) -> None:
        self._activate = ACTIVATIONS[problem.activation]

    def forward(self, tokens: Tensor, ends: Tensor, weights: ExpertWeights) -> Tensor:
        """See ExpertsKernel."""
        output = torch.empty_like(tokens)
        first = 0
        for expert, last in enumerate(ends.tolist()):
            if last > first:
                gate, up = (tokens[first:last] @ weights.gate_up[expert]).chunk(2, dim=-1)
                torch.mm(self._activate(gate) * up, weights.down[expert], out=output[first:last])
            first = last
        return output


class GroupedProduct:
    """Two products over all groups; their borders stay on the device.

    Args:
        problem: what to compute.
    """

    reads_host = False

    def __init__(self, problem: ExpertsProblem) -> None:
        self._activate = ACTIVATIONS[problem.activation]

    def forward(self, tokens: Tensor, ends: Tensor, weights: ExpertWeights) -> Tensor:
        """See ExpertsKernel."""
        gate, up = F.grouped_mm(tokens, weights.gate_up, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(self._activate(gate) * up, weights.down, offs=ends)


def _grouped_limits(problem: ExpertsProblem) -> str | None:
    # Rows of the operands must begin at multiples of 16 bytes.
    widths = {"hidden_size": problem.hidden_size, "intermediate_size": problem.intermediate_size}
    odd = [f"{name} {width}: no multiple of 8" for name, width in widths.items() if width % 8]
    if odd:
        return ", ".join(odd)
    return None if torch.cuda.get_device_capability() >= (8, 0) else "compute capability below 8.0"


ExpertsSpec: TypeAlias = OperatorSpec[ExpertsProblem, ExpertsKernel]
LOOP_SPEC: Final[ExpertsSpec] = OperatorSpec("expert_loop", ExpertLoop)
GROUPED_SPEC: Final[ExpertsSpec] = OperatorSpec(
    "grouped_mm", GroupedProduct, frozenset(("cuda",)), frozenset((torch.bfloat16,)), _grouped_limits
)
