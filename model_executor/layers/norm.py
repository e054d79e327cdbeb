"""Operator "norm": root-mean-square norm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from model_executor.layers.linear import frozen_parameter
from model_executor.layers.operator import OperatorSpec
from model_executor.models.spec import AttentionSpec, NormSpec


@dataclass(frozen=True)
class NormProblem:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last axis, with 1 + weight for weight if `offset`.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of input, weight and output.
        size: of the last axis.
        offset, eps: see NormSpec.
    """

    device: str
    dtype: torch.dtype
    size: int
    offset: bool
    eps: float

    def __str__(self) -> str:
        scale = "1 + weight" if self.offset else "weight"
        return (
            f"{self.device} {str(self.dtype).removeprefix('torch.')} {self.size}, scaled by {scale}, eps {self.eps:g}"
        )


class NormKernel(Protocol):
    """Operator "norm"."""

    def forward(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """The norm of x, in its dtype; with `added`, of x + added, rounded to the dtype, which x becomes.

        Args:
            x: [..., size]; with `added`, [T, size].
            weight: [size].
            added: of x's shape; None: nothing.
        """
        ...


class TorchNorm:
    """The norm as torch computes it, see rms_norm.

    Args:
        problem: what to compute.
    """

    def __init__(self, problem: NormProblem) -> None:
        self._problem = problem

    def forward(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """See NormKernel."""
        if added is not None:
            x.add_(added)
        return rms_norm(x, weight, self._problem.eps, offset=self._problem.offset)


NormKernelSpec: TypeAlias = OperatorSpec[NormProblem, NormKernel]
TORCH_SPEC: Final[NormKernelSpec] = OperatorSpec("torch_norm", TorchNorm)


class RmsNorm(nn.Module):
    """The norm of a last axis.

    Args:
        size: length of the last axis.
        spec: of the norm.
        dtype, device: of the weight.
        kernel: computes it; None: torch.
    """

    def __init__(
        self, size: int, spec: NormSpec, dtype: torch.dtype, device: torch.device, kernel: NormKernel | None = None
    ) -> None:
        super().__init__()
        self.weight = frozen_parameter((size,), dtype, device)
        self.kernel = kernel or TorchNorm(NormProblem(device.type, dtype, size, spec.offset, spec.eps))

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """See NormKernel."""
        return self.kernel.forward(x, self.weight, added)


class QueryKeyNorm(nn.Module):
    """The norm of each head of queries and of keys, with one weight for all query heads and one for all key heads.

    Args:
        heads: how many there are, and of which size.
        spec: of the norm.
        dtype, device: of the weight, whose first half belongs to the queries.
    """

    head_kind: Tensor

    def __init__(self, heads: AttentionSpec, spec: NormSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = frozen_parameter((2 * heads.head_dim,), dtype, device)
        kinds = torch.tensor([0] * heads.num_heads + [1] * heads.num_kv_heads, device=device)
        self.register_buffer("head_kind", kinds, persistent=False)
        self.spec = spec

    def forward(self, heads: Tensor) -> Tensor:
        """Queries and keys [T, num_heads + num_kv_heads, head_dim] to the same."""
        weight = self.weight.view(2, -1)[self.head_kind]
        return rms_norm(heads, weight, self.spec.eps, offset=self.spec.offset)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: bool) -> Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last axis, see NormProblem.

    Mean and division run in float32 whatever the dtype. Without an offset the product with the weight runs in the
    dtype; with one (Gemma) all of it runs in float32 and is rounded once.
    """
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * (1.0 + weight.float())).to(x.dtype) if offset else weight * unit.to(x.dtype)
