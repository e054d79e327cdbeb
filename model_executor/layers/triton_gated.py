"""Operator "linear" with a gate: torch's product, and all that follows it in Triton; the kernel is kernels/gated.py."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model_executor.kernels.limits import DTYPES, missing, power_above
from model_executor.layers.linear import LinearProblem, LinearSpec, product
from model_executor.layers.operator import OperatorSpec

# Of a program: eight to a thread, so that each loads 16 bytes at once.
ELEMENTS: Final = 1024
WARPS: Final = 4


class TritonGate:
    """activation(gate) * up in one launch. Safe to capture in a CUDA graph.

    Args:
        problem: of the product before it, which has a gate.
    """

    def __init__(self, problem: LinearProblem) -> None:
        from model_executor.kernels.gated import gated_kernel  # needs triton

        self._kernel = gated_kernel
        self._size = problem.outputs // 2
        width = min(power_above(self._size), ELEMENTS)
        self._programs = -(-self._size // width)
        self._constants = {"SIZE": self._size, "ACTIVATION": problem.gate, "WIDTH": width}

    def __call__(self, halves: Tensor) -> Tensor:
        """[T, 2 * size] to [T, size]."""
        assert halves.stride(1) == 1
        rows = halves.shape[0]
        output = torch.empty((rows, self._size), dtype=halves.dtype, device=halves.device)
        if rows:
            self._kernel[rows, self._programs](halves, output, halves.stride(0), **self._constants, num_warps=WARPS)
        return output


class GatedProduct:
    """The product with a weight as it is, gated.

    Args:
        weight, bias: see LinearKernel.
        gate: what follows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gate: TritonGate) -> None:
        self.packed = weight.detach()
        self._bias = bias
        self._gate = gate

    @property
    def stored_as(self) -> str:
        """See Product."""
        return str(self.packed.dtype).removeprefix("torch.")

    def __call__(self, x: Tensor) -> Tensor:
        """See Product."""
        return self._gate(product(x, self.packed, self._bias))


class GatedLinear:
    """Gates products.

    Args:
        problem: of the products.
    """

    def __init__(self, problem: LinearProblem) -> None:
        self._gate = TritonGate(problem)

    def pack(self, weight: Tensor, bias: Tensor | None) -> GatedProduct:
        """See LinearKernel."""
        return GatedProduct(weight, bias, self._gate)


def _limits(problem: LinearProblem) -> str | None:
    if problem.gate is None:
        return "no gate: nothing follows the product"
    return "int8: computes in the dtype only" if problem.int8 else missing()


SPEC: Final[LinearSpec] = OperatorSpec("matmul_triton_gate", GatedLinear, frozenset(("cuda",)), DTYPES, _limits)
