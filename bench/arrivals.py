"""When requests are sent: all at once, or one after the other at random distances around a rate."""

from __future__ import annotations

import math
import random
from typing import Literal

from msgspec import Struct

from bench.errors import UsageError

Ramp = Literal["linear", "exponential"]


class Pace(Struct, frozen=True):
    """How requests follow each other.

    Attributes:
        request_rate: mean requests a second; infinite: all at once.
        burstiness: shape of the gamma distribution of distances: 1 Poisson arrivals, below 1 bursts, above 1 more even.
        ramp: how the rate goes from ramp_start to ramp_end over the requests; None: it stays request_rate.
        ramp_start, ramp_end: requests a second.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None
    ramp_start: float = 0.0
    ramp_end: float = 0.0

    def check(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            UsageError: a value is out of its range.
        """
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate: must be above 0, is {self.request_rate:g}")
        if not 0 < self.burstiness < math.inf:
            raise UsageError(f"--burstiness: must be above 0, is {self.burstiness:g}")
        if self.ramp is not None and not (0 < self.ramp_start < math.inf and 0 < self.ramp_end < math.inf):
            raise UsageError(f"--ramp-up-start-rps, --ramp-up-end-rps: {self.ramp_start:g}, {self.ramp_end:g}: above 0")

    def rate(self, share: float) -> float:
        """Requests a second when this share of all requests, 0 .. 1, has been sent."""
        if self.ramp is None:
            return self.request_rate
        if self.ramp == "linear":
            return self.ramp_start + (self.ramp_end - self.ramp_start) * share
        return float(self.ramp_start * (self.ramp_end / self.ramp_start) ** share)


def starts(pace: Pace, count: int, seed: int) -> list[float]:
    """Seconds from the beginning at which each of `count` requests is sent; the first at 0."""
    draw = random.Random(f"arrivals {seed}")
    now, found = 0.0, []
    for index in range(count):
        found.append(now)
        rate = pace.rate(index / max(1, count - 1))
        if math.isfinite(rate):
            now += draw.gammavariate(pace.burstiness, 1 / (rate * pace.burstiness))
    return found
