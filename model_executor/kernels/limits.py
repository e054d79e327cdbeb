"""What all Triton kernels need and take. Unlike its neighbours this module imports no triton."""

from __future__ import annotations

import importlib.util
from typing import Final

import torch

DTYPES: Final = frozenset((torch.float32, torch.bfloat16, torch.float16))


def power_above(value: int) -> int:
    """The smallest power of two that is not less: no other length can a tile have."""
    return 1 << max(value - 1, 0).bit_length()


def missing() -> str | None:
    """Why Triton cannot be used here; None when it can."""
    return None if importlib.util.find_spec("triton") else "package triton: not installed"
