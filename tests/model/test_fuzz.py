"""Every mode gives every request the tokens it gets alone."""

from __future__ import annotations

import itertools
import random
from typing import get_args

import pytest

from tests.model.harness import Force, Harness, Mode, verify
from tests.model.trace import random_trace

MODES = [
    Mode(overlap, caching, chunk, batching, policy, force)
    for overlap, caching, chunk, batching, policy, force in itertools.product(
        (False, True), (False, True), (0, 1, 5), ("continuous", "static"), ("fcfs", "priority"), get_args(Force)
    )
]


def run(seed: int, mode: Mode, requests: int = 12) -> Harness:
    """One trace in one mode."""
    trace = random_trace(seed, requests=requests)
    harness = Harness(trace.model, mode, seed)
    harness.run(trace)
    verify(trace, harness)
    return harness


@pytest.mark.parametrize("seed", range(4))
def test_all_modes_agree(seed: int) -> None:
    for index, mode in enumerate(MODES):
        run(seed, Mode(**{**mode.__dict__, "eager": index % 2 == 0}))


@pytest.mark.parametrize("batch", range(10))
def test_random_traces_in_random_modes(batch: int) -> None:
    rng = random.Random(batch)
    for seed in range(1000 + 40 * batch, 1000 + 40 * (batch + 1)):
        mode = rng.choice(MODES)
        run(seed, Mode(**{**mode.__dict__, "eager": rng.random() < 0.5}))
