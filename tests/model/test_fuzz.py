"""Every mode gives every request the tokens it gets alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Final

import pytest

from engine_core.policy import Batching, Policy
from tests.model.harness import Force, Harness, Mode, Reservation, verify
from tests.model.trace import Groups, random_trace

BATCHINGS: Final[tuple[Batching, ...]] = ("continuous", "static")
POLICIES: Final[tuple[Policy, ...]] = ("fcfs", "priority")
SLIDING: Final[tuple[Groups, ...]] = ("window", "full and window", "two windows")
FORCES: Final[tuple[Force, ...]] = ("never", "random", "each token")
MODES = [
    Mode(overlap, caching, chunk, batching, policy, force)
    for overlap, caching, chunk in itertools.product((False, True), (False, True), (0, 1, 5))
    for batching in BATCHINGS
    for policy in POLICIES
    for force in FORCES
]
# The cache off, paging off, or both: for pools without windows, as the core takes them then.
PLACES: Final[tuple[tuple[bool, Reservation], ...]] = (
    (False, "paged"),
    (True, "contiguous"),
    (False, "contiguous"),
)
MEASURES = [
    replace(mode, kv_cache=kv_cache, reservation=reservation)
    for mode in MODES
    if not mode.prefix_caching
    for kv_cache, reservation in PLACES
]

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
BATCHES = [0, 1, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(2, 5))]


def run(seed: int, mode: Mode, requests: int = 12, kind: Groups = "full") -> Harness:
    """One trace in one mode."""
    trace = random_trace(seed, requests=requests, kind=kind)
    harness = Harness(trace.model, mode, seed)
    harness.run(trace)
    verify(trace, harness)
    return harness


@pytest.mark.parametrize("seed", SEEDS)
def test_all_modes_agree(seed: int) -> None:
    for index, mode in enumerate(MODES):
        run(seed, replace(mode, eager=index % 2 == 0))


@pytest.mark.parametrize("seed", SEEDS)
def test_measures_agree_with_all_modes(seed: int) -> None:
    for index, mode in enumerate(MEASURES):
        run(seed, replace(mode, eager=index % 2 == 0))


@pytest.mark.parametrize("batch", BATCHES)
def test_random_traces_in_random_modes(batch: int) -> None:
    rng = random.Random(batch)
    for seed in range(1000 + 40 * batch, 1000 + 40 * (batch + 1)):
        mode = rng.choice(MODES + MEASURES)
        run(seed, replace(mode, eager=rng.random() < 0.5))


@pytest.mark.parametrize("kind", SLIDING)
def test_all_modes_agree_with_windows(kind: Groups) -> None:
    # Every fifth: no choice of a mode has a period that divides five, so all stand beside all others.
    for index, mode in enumerate(MODES[::5]):
        run(50 + index, replace(mode, eager=index % 2 == 0), kind=kind)


@pytest.mark.parametrize("kind", SLIDING)
@pytest.mark.parametrize("batch", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_traces_with_windows(batch: int, kind: Groups) -> None:
    rng = random.Random(500 + batch)
    for seed in range(2000 + 40 * batch, 2000 + 40 * (batch + 1)):
        run(seed, replace(rng.choice(MODES), eager=rng.random() < 0.5), kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_all_modes_agree_on_longer_traces(seed: int) -> None:
    for index, mode in enumerate(MODES):
        run(seed, replace(mode, eager=index % 2 == 0), requests=20)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(50))
def test_thousands_of_random_traces(batch: int) -> None:
    rng = random.Random(1_000 + batch)
    for seed in range(100_000 + 100 * batch, 100_000 + 100 * (batch + 1)):
        kind = rng.choice(("full", *SLIDING))
        run(seed, replace(rng.choice(MODES), eager=rng.random() < 0.5), requests=rng.choice([3, 12, 30]), kind=kind)
