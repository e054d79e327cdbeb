"""Operator "norm" in Triton; the kernel stands in kernels/norm.py."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model_executor.kernels.limits import DTYPES, missing, power_above
from model_executor.layers.norm import NormKernelSpec, NormProblem
from model_executor.layers.operator import OperatorSpec

# A program holds a row in its registers.
LARGEST_SIZE: Final = 16384
ELEMENTS_A_WARP: Final = 512
MOST_WARPS: Final = 16


class TritonNorm:
    """One launch, with the sum before the norm as without. Safe to capture in a CUDA graph.

    Args:
        problem: what to compute.
    """

    def __init__(self, problem: NormProblem) -> None:
        from model_executor.kernels.norm import norm_kernel  # needs triton

        self._kernel = norm_kernel
        self._eps = problem.eps
        width = power_above(problem.size)
        self._warps = min(max(width // ELEMENTS_A_WARP, 1), MOST_WARPS)
        self._constants = {"SIZE": problem.size, "OFFSET": problem.offset, "WIDTH": width}

    def forward(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """See NormKernel."""
        rows = x.reshape(-1, x.shape[-1])
        more = rows if added is None else added
        # The sum goes into x itself, which two axes are never copied for.
        assert added is None or added.shape == x.shape == rows.shape
        assert rows.stride(1) == more.stride(1) == 1
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if rows.shape[0]:
            self._kernel[rows.shape[0],](
                *(rows, more, weight, output, rows.stride(0), more.stride(0), self._eps),
                **self._constants,
                ADDS=added is not None,
                num_warps=self._warps,
            )
        return output


def _limits(problem: NormProblem) -> str | None:
    if problem.size > LARGEST_SIZE:
        return f"size {problem.size}: takes up to {LARGEST_SIZE}"
    return missing()


SPEC: Final[NormKernelSpec] = OperatorSpec("triton_norm", TritonNorm, frozenset(("cuda",)), DTYPES, _limits)
