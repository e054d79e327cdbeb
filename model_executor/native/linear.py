"""Operator "linear" by packed weights."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model_executor.layers.int8 import group_fault
from model_executor.layers.linear import LinearKernel, LinearProblem, LinearSpec, Product
from model_executor.layers.operator import OperatorSpec
from model_executor.models.spec import Activation
from model_executor.native.library import LinearStruct, Native

PANEL: Final = 32
# The kinds of narrow.h and linear.h.
KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
DTYPE_OF_KIND: Final = {kind: dtype for dtype, kind in KINDS.items()}
FINISH: Final[dict[Activation | None, int]] = {None: 0, "silu": 1, "gelu_tanh": 2}


class PackedProduct:
    """A product with a packed weight.

    Computed in float32, the weight is kept in the narrowest of float32, float16 and bfloat16 that holds every element
    exactly: a checkpoint in bfloat16 gives the results of float32 with half the bytes to read. Computed in int8, it is
    what layers/int8.py says.

    Args:
        native: that computes.
        problem: of the product.
        weight: float32 [inputs, outputs], any strides.
        bias: float32 [outputs], or None.

    Attributes:
        problem: as given.
        struct: as C takes it; it points into `packed`.
    """

    def __init__(self, native: Native, problem: LinearProblem, weight: Tensor, bias: Tensor | None) -> None:
        self._native = native
        self.problem = problem
        self._width = problem.outputs if problem.gate is None else problem.outputs // 2
        self.kind = KINDS[torch.int8] if problem.int8 else _narrowest(native, weight)
        panels = -(-problem.outputs // PANEL)
        if problem.int8:
            size = native.int8_bytes(problem.inputs, problem.outputs)
        else:
            size = panels * PANEL * problem.inputs * DTYPE_OF_KIND[self.kind].itemsize
        self.packed = native.memory.take(size)
        self._bias = None if bias is None else _by_panels(bias, problem, panels * PANEL)
        self.struct = LinearStruct(
            problem.inputs,
            problem.outputs,
            self.kind,
            FINISH[problem.gate],
            self.packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )
        native.pack(self.struct, weight.data_ptr(), *weight.stride())

    @property
    def stored_as(self) -> str:
        """What the weight is kept in."""
        return str(DTYPE_OF_KIND[self.kind]).removeprefix("torch.")

    def __call__(self, x: Tensor) -> Tensor:
        """See Product."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        out = x.new_empty(x.shape[0], self._width)
        self._native.linear(self.struct, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), self._width)
        return out


def _narrowest(native: Native, weight: Tensor) -> int:
    dense = weight if weight.is_contiguous() else weight.t()
    assert dense.is_contiguous()
    return native.narrowest(dense.data_ptr(), dense.numel())


def _by_panels(bias: Tensor, problem: LinearProblem, size: int) -> Tensor:
    """The bias in the order of the panels' columns, with zeros for columns that are none."""
    if problem.gate is None:
        return torch.cat((bias, bias.new_zeros(size - len(bias))))
    half = problem.outputs // 2
    places = torch.zeros(2, size // 2)
    places[0, :half], places[1, :half] = bias[:half], bias[half:]
    return places.view(2, -1, PANEL // 2).transpose(0, 1).flatten().contiguous()


class PackedLinear:
    """Packs weights.

    Args:
        native: that computes.
        problem: of the products.
    """

    def __init__(self, native: Native, problem: LinearProblem) -> None:
        self._native = native
        self._problem = problem

    def pack(self, weight: Tensor, bias: Tensor | None) -> Product:
        """See LinearKernel."""
        return PackedProduct(self._native, self._problem, weight, bias)


def packed_linear(native: Native) -> LinearSpec:
    """The registry's entry."""

    def make(problem: LinearProblem) -> LinearKernel:
        return PackedLinear(native, problem)

    def limits(problem: LinearProblem) -> str | None:
        if problem.gate not in FINISH:
            return f"gate {problem.gate}: takes silu and gelu_tanh"
        return group_fault(problem) if problem.int8 else None

    return OperatorSpec(f"packed_{native.name}", make, frozenset(("cpu",)), frozenset((torch.float32,)), limits)
