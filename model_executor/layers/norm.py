"""Root-mean-square norm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_executor.layers.linear import frozen_parameter


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
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)
