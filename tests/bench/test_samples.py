"""Statistics against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.samples import deviation, mean, percentile, spread

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(NUMBERS, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


@given(NUMBERS)
def test_mean_and_deviation_are_numpys(values: list[float]) -> None:
    assert mean(values) == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert deviation(values) == pytest.approx(np.std(values), rel=1e-6, abs=1e-6)


def test_no_samples_give_zero() -> None:
    assert (percentile([], 99), mean([]), deviation([]), deviation([3.0])) == (0.0, 0.0, 0.0, 0.0)


def test_a_spread_tells_median_and_ends() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, 3.0, 3)
    assert str(found) == "2 (1-3)"
