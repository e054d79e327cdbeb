"""A linear map whose weight is stored (in, out)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """x @ weight + bias.

    The weight is contiguous as (in, out): on CPU the product then streams it in the order in which it lies, which
    measures faster than the (out, in) order of checkpoints.

    Args:
        in_features, out_features: widths.
        bias: whether there is one.
        dtype, device: of the parameters, which are left uninitialized.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = frozen_parameter((in_features, out_features), dtype, device)
        self.bias = frozen_parameter((out_features,), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x, self.weight)


def frozen_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Room for weights that are loaded later and never trained."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
