"""Every mode gives every request the tokens it gets alone, on the real executor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from model_executor.runner import Runner
from tests.model.harness import Mode, verify
from tests.model.real import BUCKETS, Known, RealHarness, Solo, bring_up_rand, real_trace, solo_runs
from tests.model.test_fuzz import MODES
from tests.model.trace import Trace

POOL = 60


@dataclass(frozen=True)
class Rand:
    """RAND, run as it is and on static buffers; requests with the answers they get alone."""

    plain: Runner
    padded: Runner
    known: Known
    pool: list[Solo]


@pytest.fixture(scope="module")
def rand(rand_folder: Path) -> Rand:
    plain, padded = bring_up_rand(rand_folder).runner, bring_up_rand(rand_folder, BUCKETS).runner
    assert isinstance(plain, Runner)
    assert isinstance(padded, Runner)
    return Rand(plain, padded, Known(), solo_runs(plain, POOL, seed=1))


def run(rand: Rand, trace: Trace, mode: Mode, seed: int, *, graphs: bool) -> RealHarness:
    """One trace in one mode."""
    harness = RealHarness(trace.model, mode, seed, rand.padded if graphs else rand.plain, rand.known)
    harness.run(trace)
    verify(trace, harness)
    return harness


def test_the_pool_has_what_the_proof_needs(rand: Rand) -> None:
    finishes = [solo.finish for solo in rand.pool]
    assert finishes.count("stop") > POOL // 10
    assert finishes.count("length") > POOL // 4
    greedy = [solo for solo in rand.pool if solo.params.greedy]
    assert POOL // 4 < len(greedy) < POOL
    # The answers depend on their prompts.
    assert len({tuple(solo.tokens) for solo in rand.pool if len(solo.tokens) > 2}) > POOL // 2


@pytest.mark.parametrize("graphs", [False, True])
def test_all_modes_give_the_tokens_of_solo_runs(rand: Rand, graphs: bool) -> None:
    """Each mode on a trace of its own; pools so small that they are full nearly all the time."""
    preemptions = cached = 0
    # Every fifth: no choice of a mode has a period that divides five, so all stand beside all others.
    for index, mode in enumerate(MODES[2 * graphs :: 5]):
        trace = real_trace(index, rand.pool)
        harness = run(rand, trace, replace(mode, eager=index % 2 == 0), index, graphs=graphs)
        status = harness.scheduler.status(harness.now)
        preemptions += status.preemptions
        cached += status.cached_tokens
    assert preemptions > 30
    assert cached > 40
    assert rand.known.reused > 30


def test_one_trace_in_all_modes(rand: Rand) -> None:
    trace = real_trace(1000, rand.pool, requests=10)
    for index, mode in enumerate(MODES[::7]):
        run(rand, trace, replace(mode, eager=index % 2 == 0), index, graphs=index % 4 < 2)


def test_padded_steps_ran(rand: Rand) -> None:
    run(rand, real_trace(7, rand.pool), Mode(), 7, graphs=True)
    assert any("replayed" in line for line in rand.padded.explain()[1:])


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(20))
def test_many_traces_in_all_modes(rand: Rand, batch: int) -> None:
    for index, mode in enumerate(MODES):
        seed = 10_000 + 1000 * batch + index
        trace = real_trace(seed, rand.pool, requests=16)
        run(rand, trace, replace(mode, eager=seed % 2 == 0), seed, graphs=seed % 3 > 0)
