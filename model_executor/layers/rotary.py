"""Rotary position embedding (Su et al., 2021) and its scaled forms.

The frequencies follow transformers' formulas operation by operation in float32, because angles of thousands of radians
turn a last-bit difference of a frequency into a visible one of the cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Final

import torch
from torch import Tensor, nn

from model_executor.models.spec import RopeKind, RopeSpec


class Rotation:
    """The rotation at the positions of one batch.

    Args:
        cos_table, sin_table: [positions, rotary_dim / 2].
        positions: int64 [T].
    """

    def __init__(self, cos_table: Tensor, sin_table: Tensor, positions: Tensor) -> None:
        self.cos_table = cos_table
        self.sin_table = sin_table
        self._positions = positions

    @cached_property
    def cos(self) -> Tensor:
        """[T, 1, rotary_dim / 2]."""
        return self.cos_table[self._positions].unsqueeze(1)

    @cached_property
    def sin(self) -> Tensor:
        """[T, 1, rotary_dim / 2]."""
        return self.sin_table[self._positions].unsqueeze(1)

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate the leading rotary_dim elements of each head; [T, heads, head_dim] to the same."""
        half = self.cos.shape[-1]
        first, second, rest = torch.split(heads, [half, half, heads.shape[-1] - 2 * half], dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat((*turned, rest), dim=-1)


class Rotary(nn.Module):
    """Tables of cosines and sines for the positions 0 .. length - 1.

    Args:
        spec: the rotation.
        length: positions, at most spec.reach.
        dtype: of the tables; they are computed in float32 and rounded once.
        device: of the tables.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: RopeSpec, length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert length <= spec.reach
        angles = torch.arange(length, dtype=torch.float32).unsqueeze(1) * frequencies(spec)
        self.register_buffer("cos", self._table(angles.cos(), spec, dtype, device), persistent=False)
        self.register_buffer("sin", self._table(angles.sin(), spec, dtype, device), persistent=False)

    @staticmethod
    def _table(values: Tensor, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
        return (values * spec.attention_factor).to(dtype=dtype, device=device)

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation at positions int64 [T]."""
        return Rotation(self.cos, self.sin, positions)


def frequencies(spec: RopeSpec) -> Tensor:
    """Angle per position of each pair of elements: float32 [rotary_dim / 2]."""
    return _SCALED[spec.kind](spec)


def _plain(spec: RopeSpec) -> Tensor:
    return 1.0 / _periods(spec, spec.theta)


def _periods(spec: RopeSpec, theta: float) -> Tensor:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    powers: Tensor = theta**exponents
    return powers


def _linear(spec: RopeSpec) -> Tensor:
    return _plain(spec) / spec.factor


def _dynamic(spec: RopeSpec) -> Tensor:
    """NTK-aware scaling at the length the model was trained for: beyond it the angles would depend on the length."""
    stretch = (spec.factor * spec.reach / spec.reach) - (spec.factor - 1)
    return 1.0 / _periods(spec, spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2)))


def _llama3(spec: RopeSpec) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, the band between is interpolated."""
    plain = _plain(spec)
    wavelengths = 2 * math.pi / plain
    longest = spec.original_max_position / spec.low_freq_factor
    shortest = spec.original_max_position / spec.high_freq_factor
    scaled = torch.where(wavelengths > longest, plain / spec.factor, plain)
    share = (spec.original_max_position / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - share) * scaled / spec.factor + share * scaled
    between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(between, blended, scaled)


def _yarn(spec: RopeSpec) -> Tensor:
    """YaRN (Peng et al., 2023): a ramp over the dimensions between kept and interpolated frequencies."""
    periods = _periods(spec, spec.theta)
    low, high = _yarn_borders(spec)
    ramp = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (spec.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_borders(spec: RopeSpec) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        turns = spec.original_max_position / (rotations * 2 * math.pi)
        return (spec.rotary_dim * math.log(turns)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


_SCALED: Final[Mapping[RopeKind, Callable[[RopeSpec], Tensor]]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
