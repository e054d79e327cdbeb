"""Step statistics count into the buckets that clients expect."""

from __future__ import annotations

import pytest

from engine_core.stats import StepStats
from engine_core.wire.client import STEP_TIME_BOUNDS, STEP_TOKEN_BOUNDS


def test_nothing_yet() -> None:
    stats = StepStats()
    assert (stats.steps, stats.seconds, stats.tokens) == (0, 0.0, 0)
    assert stats.time_buckets == [0] * (len(STEP_TIME_BOUNDS) + 1)
    assert stats.token_buckets == [0] * (len(STEP_TOKEN_BOUNDS) + 1)


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (0.001, 0), (0.0011, 1), (0.0025, 1), (30.0, len(STEP_TIME_BOUNDS) - 1), (30.1, len(STEP_TIME_BOUNDS))],
)
def test_a_time_at_a_bound_counts_below_it(seconds: float, bucket: int) -> None:
    stats = StepStats()
    stats.record(seconds, 1)
    assert [i for i, count in enumerate(stats.time_buckets) if count] == [bucket]


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 0), (2, 1), (3, 2), (8192, 13), (8193, 14)])
def test_tokens_at_a_bound_count_below_it(tokens: int, bucket: int) -> None:
    stats = StepStats()
    stats.record(0.0, tokens)
    assert [i for i, count in enumerate(stats.token_buckets) if count] == [bucket]


def test_sums() -> None:
    stats = StepStats()
    for seconds, tokens in ((0.25, 3), (0.5, 4), (40.0, 9000)):
        stats.record(seconds, tokens)
    assert (stats.steps, stats.seconds, stats.tokens) == (3, 40.75, 9007)
    assert sum(stats.time_buckets) == sum(stats.token_buckets) == 3
