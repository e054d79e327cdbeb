"""What the steps cost: counts since the start, as histograms over the bounds that clients know."""

from __future__ import annotations

from bisect import bisect_left

from engine_core.wire.client import STEP_TIME_BOUNDS, STEP_TOKEN_BOUNDS


class StepStats:
    """Counts of finished steps.

    A bucket counts the steps at or below its bound and above the one before; the last counts those above all bounds.

    Attributes:
        steps: finished.
        seconds: sum of their times on the device.
        tokens: sum of the tokens they computed.
        time_buckets, token_buckets: counts over STEP_TIME_BOUNDS and STEP_TOKEN_BOUNDS, one more than there are bounds.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.tokens = 0
        self.time_buckets = [0] * (len(STEP_TIME_BOUNDS) + 1)
        self.token_buckets = [0] * (len(STEP_TOKEN_BOUNDS) + 1)

    def record(self, seconds: float, tokens: int) -> None:
        """Count one step."""
        self.steps += 1
        self.seconds += seconds
        self.tokens += tokens
        self.time_buckets[bisect_left(STEP_TIME_BOUNDS, seconds)] += 1
        self.token_buckets[bisect_left(STEP_TOKEN_BOUNDS, tokens)] += 1
