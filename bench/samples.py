"""Figures of samples: mean, spread, percentiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the samples lie, between neighbours by a straight line.

    Args:
        values: samples; none give 0.
        percent: 0 .. 100.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of no samples."""
    return statistics.fmean(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of these samples themselves; 0 of fewer than two."""
    return statistics.pstdev(values) if len(values) > 1 else 0.0


class Spread(Struct, frozen=True):
    """Median, smallest and largest of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g}-{self.high:.4g})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one measurement."""
    return Spread(statistics.median(values), min(values), max(values), len(values))
