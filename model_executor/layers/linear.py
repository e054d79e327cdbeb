"""Operator "linear": a linear map whose weight is stored (in, out), and what may follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from model_executor.layers.activation import ACTIVATIONS
from model_executor.layers.operator import OperatorSpec
from model_executor.models.spec import Activation


@dataclass(frozen=True)
class LinearProblem:
    """x @ weight + bias, or activation(gate) * up of its two halves.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of input, weight and output.
        inputs, outputs: widths of the weight.
        bias: whether there is one.
        gate: the activation on the first half of the product, which then multiplies the second; None: no halves.
        int8: whether weight and input are brought to eight bits for the product, see int8.py.
    """

    device: str
    dtype: torch.dtype
    inputs: int
    outputs: int
    bias: bool
    gate: Activation | None = None
    int8: bool = False

    def __str__(self) -> str:
        text = f"{self.device} {str(self.dtype).removeprefix('torch.')} {self.inputs} to {self.outputs}"
        text += (", bias" if self.bias else "") + (", in int8" if self.int8 else "")
        return text if self.gate is None else f"{text}, halves gated by {self.gate}"


class Product(Protocol):
    """A product with a weight that a kernel keeps in its own form."""

    @property
    def packed(self) -> Tensor:
        """All that is kept of the weight, as bytes."""
        ...

    @property
    def stored_as(self) -> str:
        """In which numbers."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[T, inputs] to [T, outputs], or half of that with a gate."""
        ...


class LinearKernel(Protocol):
    """Operator "linear"."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Product | None:
        """The product with a weight [inputs, outputs] of any strides; None: the weight is used as it is."""
        ...


class Unpacked:
    """torch's product with the weight as it is.

    Args:
        problem: what to compute.
    """

    def __init__(self, problem: LinearProblem) -> None:
        del problem

    def pack(self, weight: Tensor, bias: Tensor | None) -> None:
        """See LinearKernel."""
        del weight, bias


LinearSpec: TypeAlias = OperatorSpec[LinearProblem, LinearKernel]
UNPACKED_SPEC: Final[LinearSpec] = OperatorSpec(
    "torch_matmul", Unpacked, other=lambda problem: "int8: computes in the dtype only" if problem.int8 else None
)


class Linear(nn.Module):
    """A linear map.

    The weight is contiguous as (in, out): on CPU the product then streams it in the order in which it lies, which
    measures faster than the (out, in) order of checkpoints.

    Args:
        in_features, out_features: widths.
        bias: whether there is one.
        dtype, device: of the parameters, which are left uninitialized.
        gate: see LinearProblem.
        kernel: packs the weight; None: it stays as it is.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        gate: Activation | None = None,
        kernel: LinearKernel | None = None,
    ) -> None:
        super().__init__()
        self.weight = frozen_parameter((in_features, out_features), dtype, device)
        self.bias = frozen_parameter((out_features,), dtype, device) if bias else None
        self.gate = gate
        self.kernel = kernel
        self.product: Product | None = None

    def pack(self) -> None:
        """Give the loaded weight to the kernel; what the kernel has packed is dropped here."""
        if self.kernel is not None:
            self.product = self.kernel.pack(self.weight, self.bias)
        if self.product is not None:
            del self.weight, self.bias
            self.register_buffer("packed", self.product.packed, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out], or half of that with a gate."""
        if self.product is not None:
            return self.product(x)
        made = product(x, self.weight, self.bias)
        return made if self.gate is None else gated(made, self.gate)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight + bias."""
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def gated(made: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of gate and up that lie side by side on the last axis."""
    gate, up = made.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def frozen_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Room for weights that are loaded later and never trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
