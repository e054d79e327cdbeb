"""Every mode gives every request the tokens it gets alone, on the real executor: with one KV group and with two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine_core.wire.executor import KvGroup
from model_executor.runner import Runner
from tests.fixtures.families import write_family
from tests.model.harness import Mode, verify
from tests.model.real import (
    BUCKETS,
    VOCAB,
    Known,
    RealHarness,
    Solo,
    bring_up_on_cpu,
    real_trace,
    runner_of,
    solo_runs,
)
from tests.model.test_fuzz import MEASURES, MODES
from tests.model.trace import Trace

POOL = 60
WINDOW = 9


def every(often: int, rarely: int) -> pytest.MarkDecorator:
    """Of the modes only each so manieth: rarely, and often among the slow tests.

    The steps are primes that divide no period of a mode's choices, so that each choice comes up beside others.
    """
    return pytest.mark.parametrize("step", [rarely, pytest.param(often, marks=pytest.mark.slow)])


@dataclass(frozen=True)
class Subject:
    """A model, run as it is and on static buffers; requests with the answers they get alone."""

    plain: Runner
    padded: Runner
    groups: list[KvGroup]
    known: Known
    pool: list[Solo]

    def trace(self, seed: int, requests: int = 8) -> Trace:
        """A random trace of the requests."""
        return real_trace(seed, self.pool, self.groups, requests)


@pytest.fixture(scope="module", params=["rand", "gemma3"])
def subject(request: pytest.FixtureRequest, rand_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """RAND, all of whose layers see everything; and a Gemma 3, most of whose layers have a window."""
    folder = rand_folder
    if request.param == "gemma3":
        folder = tmp_path_factory.mktemp("gemma3") / "model"
        write_family(folder, "gemma3_text", vocab_size=VOCAB, sliding_window=WINDOW)
    executor = bring_up_on_cpu(folder)
    padded = runner_of(bring_up_on_cpu(folder, BUCKETS))
    groups = executor.ready.kv_groups
    assert [group.window for group in groups] == {"rand": [None], "gemma3": [None, WINDOW]}[request.param]
    return Subject(runner_of(executor), padded, groups, Known(), solo_runs(executor, POOL, seed=1))


def run(subject: Subject, trace: Trace, mode: Mode, seed: int, *, graphs: bool) -> RealHarness:
    """One trace in one mode."""
    harness = RealHarness(trace.model, mode, seed, subject.padded if graphs else subject.plain, subject.known)
    harness.run(trace)
    verify(trace, harness)
    return harness


def test_the_pool_has_what_the_proof_needs(subject: Subject) -> None:
    finishes = [solo.finish for solo in subject.pool]
    assert finishes.count("stop") > POOL // 10
    assert finishes.count("length") > POOL // 4
    greedy = [solo for solo in subject.pool if solo.params.greedy]
    assert POOL // 4 < len(greedy) < POOL
    # The answers depend on their prompts.
    assert len({tuple(solo.tokens) for solo in subject.pool if len(solo.tokens) > 2}) > POOL // 2


@pytest.mark.parametrize("graphs", [False, True])
def test_all_modes_give_the_tokens_of_solo_runs(subject: Subject, graphs: bool) -> None:
    """Each mode on a trace of its own; pools so small that they are full nearly all the time."""
    preemptions = cached = 0
    # Every eleventh: no choice of a mode has a period that divides eleven, so all stand beside all others.
    for index, mode in enumerate(MODES[3 * graphs :: 11]):
        harness = run(subject, subject.trace(index), replace(mode, eager=index % 2 == 0), index, graphs=graphs)
        status = harness.scheduler.status(harness.now)
        preemptions += status.preemptions
        cached += status.cached_tokens
    assert preemptions > 10
    assert cached > 10
    assert min(subject.known.reused[group] for group in range(len(subject.groups))) > 10


@every(17, 29)
def test_one_trace_in_all_modes(subject: Subject, step: int) -> None:
    trace = subject.trace(1000, requests=10)
    for index, mode in enumerate(MODES[::step]):
        run(subject, trace, replace(mode, eager=index % 2 == 0), index, graphs=index % 4 < 2)


@every(23, 61)
def test_cache_and_paging_off_give_the_tokens_of_solo_runs(subject: Subject, step: int) -> None:
    """Pools without windows, as the core takes them then."""
    groups = [KvGroup(None, group.num_blocks) for group in subject.groups]
    for index, mode in enumerate(MEASURES[::step]):
        trace = real_trace(2000 + index, subject.pool, groups)
        run(subject, trace, replace(mode, eager=index % 2 == 0), index, graphs=index % 4 < 2)


def test_padded_steps_ran(subject: Subject) -> None:
    run(subject, subject.trace(7), Mode(), 7, graphs=True)
    assert any("replayed" in line for line in subject.padded.explain()[1:])


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(6))
def test_longer_traces_in_all_modes(subject: Subject, batch: int) -> None:
    """Each mode once, a sixth of them in each batch."""
    for index, mode in enumerate(MODES[batch::6]):
        seed = 10_000 + 1000 * batch + index
        trace = subject.trace(seed, requests=16)
        run(subject, trace, replace(mode, eager=seed % 2 == 0), seed, graphs=seed % 3 > 0)
