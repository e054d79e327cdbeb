"""When two ways to compute something rounded at the same places."""

from __future__ import annotations

import torch
from torch import Tensor

# Sums in another order, and a device's own functions, move float32 in its last digits.
EXACT = 2e-6
ON_DEVICE = 2e-5
# Two steps between float16's smallest numbers.
SMALLEST = 1.2e-7
# Such a move can push a number over the border at which it is rounded, which is rare.
MOVED = 0.01


def unlike(ours: Tensor, theirs: Tensor, exact: float = EXACT) -> str | None:
    """What tells them apart; None where float32 is equal within `exact`, and narrower numbers are equal but for a few
    that are neighbours. NaN equals NaN.
    """
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype} {list(ours.shape)} against {theirs.dtype} {list(theirs.shape)}"
    step = exact if ours.dtype == torch.float32 else 2 * torch.finfo(ours.dtype).eps
    floor = exact if ours.dtype == torch.float32 else SMALLEST
    far = ~torch.isclose(ours.float(), theirs.float(), rtol=step, atol=floor, equal_nan=True)
    moved = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    if far.any():
        return f"{int(far.sum())} of {far.numel()} are no neighbours, such as {ours[far][0]} and {theirs[far][0]}"
    if ours.dtype != torch.float32 and int(moved.sum()) > 1 + MOVED * moved.numel():
        return f"{int(moved.sum())} of {moved.numel()} are neighbours"
    return None
