"""Root-mean-square norm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_executor.layers.linear import frozen_parameter
from model_executor.models.spec import NormSpec


class RmsNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight over the last axis.

    The mean and the division run in float32 whatever the dtype; the product with the weight runs in the dtype.

    Args:
        size: length of the last axis.
        eps: added to the mean square.
        dtype, device: of the weight.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = frozen_parameter((size,), dtype, device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size], in x's dtype."""
        return self.weight * unit_rms(x, self.eps).to(x.dtype)


class OffsetRmsNorm(RmsNorm):
    """x / sqrt(mean(x ** 2) + eps) * (1 + weight), all of it in float32 and rounded once (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size], in x's dtype."""
        return (unit_rms(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype)


class QueryKeyNorm(nn.Module):
    """The norm of each head of queries and of keys, with one weight for all query heads and one for all key heads.

    Args:
        num_heads, num_kv_heads: of queries and of keys.
        head_dim: elements of a head.
        spec: of the norm.
        dtype, device: of the weight, whose first half belongs to the queries.
    """

    head_kind: Tensor

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        spec: NormSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = frozen_parameter((2 * head_dim,), dtype, device)
        kinds = torch.tensor([0] * num_heads + [1] * num_kv_heads, device=device)
        self.register_buffer("head_kind", kinds, persistent=False)
        self.spec = spec

    def forward(self, heads: Tensor) -> Tensor:
        """Queries and keys [T, num_heads + num_kv_heads, head_dim] to the same."""
        weight = self.weight.view(2, -1)[self.head_kind]
        unit = unit_rms(heads, self.spec.eps)
        if self.spec.offset:
            return (unit * (1.0 + weight.float())).to(heads.dtype)
        return weight * unit.to(heads.dtype)


def make_norm(spec: NormSpec, size: int, dtype: torch.dtype, device: torch.device) -> RmsNorm:
    """The norm over a last axis of this size."""
    return (OffsetRmsNorm if spec.offset else RmsNorm)(size, spec.eps, dtype, device)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x ** 2) + eps) over the last axis, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
