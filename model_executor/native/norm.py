"""Operator "norm"."""

from __future__ import annotations

import torch
from torch import Tensor

from model_executor.layers.norm import NormKernel, NormKernelSpec, NormProblem
from model_executor.layers.operator import OperatorSpec
from model_executor.native.library import Native, NormStruct


class NativeNorm:
    """The norm of rows.

    Args:
        native: that computes.
        problem: what to compute.

    Attributes:
        problem: as given.
    """

    def __init__(self, native: Native, problem: NormProblem) -> None:
        self._native = native
        self.problem = problem

    def forward(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """See NormKernel."""
        x = x.contiguous() if added is None else x.add_(added).contiguous()
        out = torch.empty_like(x)
        problem = self.problem
        struct = NormStruct(
            x.data_ptr(),
            None,
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // problem.size,
            problem.size,
            float(problem.offset),
            problem.eps,
        )
        self._native.norm(struct)
        return out


def native_norm(native: Native) -> NormKernelSpec:
    """The registry's entry."""

    def make(problem: NormProblem) -> NormKernel:
        return NativeNorm(native, problem)

    return OperatorSpec(f"rms_{native.name}", make, frozenset(("cpu",)), frozenset((torch.float32,)))
