"""The reference of the products in eight bits, in plain torch.

Weights have a scale for each output channel, activations one for each token and group of input channels. A few input
channels are far larger than the rest, and one scale would leave the rest a few steps; so within each 64 channels both
sides are first turned by the same rotation, a Hadamard matrix (as QuaRot does: Ashkboos et al., 2024). The product
stays, and what stood in one channel is spread over 64.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model_executor.layers.linear import LinearProblem, LinearSpec, Product, gated
from model_executor.layers.operator import OperatorSpec

TURNED: Final = 64
MAX_GROUP: Final = 256
MOST: Final = 127


def hadamard(size: int) -> Tensor:
    """float32 [size, size], entries 1 and -1, symmetric (Sylvester, 1867). size: a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def group_of(inputs: int) -> int:
    """Input channels that share a scale: the most, up to 256, that make whole groups of whole rotations."""
    return next(size for size in range(MAX_GROUP, 0, -TURNED) if inputs % size == 0)


def rotate(x: Tensor) -> Tensor:
    """[..., K] to [..., groups, inputs of a group], each 64 of them rotated."""
    inputs = x.shape[-1]
    parts = x.reshape(*x.shape[:-1], inputs // TURNED, TURNED)
    rotated: Tensor = parts @ hadamard(TURNED) / TURNED**0.5
    group = group_of(inputs)
    return rotated.reshape(*x.shape[:-1], inputs // group, group)


def shrink(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Whole numbers -127 .. 127 as float32, and what they are to be multiplied by: one scale over the axes."""
    scale = x.abs().amax(axes, keepdim=True) / MOST
    return torch.round(x / torch.where(scale > 0, scale, 1)).clamp(-MOST, MOST), scale


class Int8Product:
    """A product whose weight is kept in int8.

    Args:
        problem: of the product.
        weight: float32 [inputs, outputs].
        bias: float32 [outputs], or None.
    """

    stored_as = "int8"

    def __init__(self, problem: LinearProblem, weight: Tensor, bias: Tensor | None) -> None:
        whole, scale = shrink(rotate(weight.t()), (-2, -1))
        self.packed = torch.cat([part.flatten().view(torch.uint8) for part in (whole.to(torch.int8), scale)])
        # Groups fill 64 bytes, so the scales behind them are aligned.
        self._whole = self.packed[: whole.numel()].view(torch.int8).view(whole.shape)
        self._scale = self.packed[whole.numel() :].view(torch.float32)
        self._bias, self._gate = bias, problem.gate

    def __call__(self, x: Tensor) -> Tensor:
        """See Product. Products of whole numbers within a group are exact in float32."""
        whole, scale = shrink(rotate(x), (-1,))
        groups = torch.bmm(whole.transpose(0, 1), self._whole.float().permute(1, 2, 0))
        made = (groups * scale.transpose(0, 1)).sum(0) * self._scale
        made = made if self._bias is None else made + self._bias
        return made if self._gate is None else gated(made, self._gate)


class Int8Linear:
    """Packs weights.

    Args:
        problem: of the products.
    """

    def __init__(self, problem: LinearProblem) -> None:
        self._problem = problem

    def pack(self, weight: Tensor, bias: Tensor | None) -> Product:
        """See LinearKernel."""
        return Int8Product(self._problem, weight, bias)


def group_fault(problem: LinearProblem) -> str | None:
    """Why a weight cannot be kept in int8."""
    return f"inputs {problem.inputs}: int8 takes multiples of {TURNED}" if problem.inputs % TURNED else None


def _limits(problem: LinearProblem) -> str | None:
    return group_fault(problem) if problem.int8 else "in float32: see torch_matmul"


INT8_SPEC: Final[LinearSpec] = OperatorSpec(
    "torch_int8", Int8Linear, frozenset(("cpu",)), frozenset((torch.float32,)), _limits
)
