"""Operator "experts": each expert's feed-forward part over the tokens that chose it, and over no other.

The tokens come sorted by expert. Both kernels are grouped matrix products; they differ in where the borders of the
groups are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.layers.activation import ACTIVATIONS
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


@dataclass(frozen=True)
class ExpertsSpec:
    """One kernel of the registry.

    Attributes:
        name: in reports.
        factory: makes the kernel for a problem that the spec does not reject.
        devices, dtypes: it runs on and in; None: all.
        width_multiple: that both widths must divide by.
        available: why it cannot be used in this process at all; None when it can.
    """

    name: str
    factory: Callable[[ExpertsProblem], ExpertsKernel]
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    width_multiple: int = 1
    available: Callable[[], str | None] = lambda: None

    def reject(self, problem: ExpertsProblem) -> tuple[str, ...]:
        """Why this kernel does not serve the problem; empty when it does."""
        reasons = []
        if self.devices is not None and problem.device not in self.devices:
            reasons.append(f"device {problem.device}: runs on {', '.join(sorted(self.devices))}")
        if self.dtypes is not None and problem.dtype not in self.dtypes:
            reasons.append(f"dtype {problem.dtype}: takes {', '.join(sorted(map(str, self.dtypes)))}")
        widths = {"hidden_size": problem.hidden_size, "intermediate_size": problem.intermediate_size}
        odd = {name: width for name, width in widths.items() if width % self.width_multiple}
        reasons += [f"{name} {width}: no multiple of {self.width_multiple}" for name, width in odd.items()]
        if not reasons and (reason := self.available()):
            reasons.append(reason)
        return tuple(reasons)


def _capability() -> str | None:
    if torch.cuda.get_device_capability() >= (8, 0):
        return None
    return "compute capability below 8.0"


LOOP_SPEC: Final = ExpertsSpec("expert_loop", ExpertLoop)
# Rows of the operands must begin at multiples of 16 bytes.
GROUPED_SPEC: Final = ExpertsSpec(
    "grouped_mm", GroupedProduct, frozenset(("cuda",)), frozenset((torch.bfloat16,)), 8, _capability
)
