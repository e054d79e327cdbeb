"""Distances between requests."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from bench.arrivals import Pace, starts
from bench.errors import UsageError

COUNT = 4000


def gaps(pace: Pace, count: int = COUNT) -> list[float]:
    """Distances of so many requests."""
    return [later - earlier for earlier, later in pairwise(starts(pace, count, seed=3))]


def test_without_a_rate_all_are_sent_at_once() -> None:
    assert starts(Pace(), 5, seed=0) == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_distances_have_mean_and_deviation_of_the_gamma_distribution(burstiness: float) -> None:
    found = gaps(Pace(request_rate=50.0, burstiness=burstiness))
    # Standard errors of both figures are below 2 and 6 %.
    assert statistics.fmean(found) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(found) == pytest.approx(1 / 50 / math.sqrt(burstiness), rel=0.2)


@pytest.mark.parametrize("ramp", ["linear", "exponential"])
def test_a_ramp_goes_from_one_rate_to_the_other(ramp: str) -> None:
    pace = Pace(burstiness=1e6, ramp=ramp, ramp_start=10.0, ramp_end=100.0)  # type: ignore[arg-type]
    found = gaps(pace)
    assert found[0] == pytest.approx(1 / 10, rel=0.02)
    assert found[-1] == pytest.approx(1 / 100, rel=0.02)
    assert pace.rate(0.5) == pytest.approx(55.0 if ramp == "linear" else math.sqrt(1000))


def test_equal_seeds_give_equal_times() -> None:
    pace = Pace(request_rate=5.0)
    assert starts(pace, 20, 1) == starts(pace, 20, 1) != starts(pace, 20, 2)


@pytest.mark.parametrize(
    "pace",
    [
        Pace(request_rate=0.0),
        Pace(request_rate=math.nan),
        Pace(burstiness=0.0),
        Pace(burstiness=math.inf),
        Pace(ramp="linear", ramp_start=0.0, ramp_end=1.0),
        Pace(ramp="exponential", ramp_start=1.0),
    ],
)
def test_values_that_mean_nothing_are_refused(pace: Pace) -> None:
    with pytest.raises(UsageError, match="above 0"):
        pace.check()
