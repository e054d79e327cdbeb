"""The status machine of a request and its counts."""

from __future__ import annotations

from array import array

import pytest

from engine_core.kv_group import Holding
from engine_core.sequence import MAX_PREEMPTIONS, Sequence, Status
from engine_core.stop import StopRules
from engine_core.wire.client import RequestTimes
from engine_core.wire.sampling import SamplingParams


def make_sequence(
    prompt_len: int = 5,
    *,
    order: int = 1,
    priority: int = 0,
    salt: str | None = None,
    output: int = 0,
    earlier: RequestTimes | None = None,
) -> Sequence:
    params = SamplingParams(seed=1, max_tokens=10)
    return Sequence(
        key=(b"client", f"r{order}"),
        order=order,
        tokens=array("i", range(prompt_len + output)),
        prompt_len=prompt_len,
        params=params,
        seed=1,
        rules=StopRules(params, (), prompt_len=prompt_len, room=100),
        priority=priority,
        salt=salt,
        now=1.0,
        earlier=earlier,
    )


def running_sequence() -> Sequence:
    seq = make_sequence()
    seq.start(0, 0, 2.0)
    seq.held = [Holding([0])]
    return seq


def test_a_row_up_to_the_end_samples() -> None:
    seq = running_sequence()
    assert seq.launch(3, 1) is False
    assert seq.launch(2, 2) is True
    assert (seq.computed, seq.total, seq.assumed, seq.in_flight, seq.last_step) == (5, 6, 1, 2, 2)
    assert seq.violations() == []


def test_decode_goes_on_before_the_token_is_known() -> None:
    seq = running_sequence()
    assert seq.launch(5, 1)
    assert seq.launch(1, 2)
    assert (seq.computed, seq.total) == (6, 7)
    assert seq.land(5, sample=True) is True
    seq.accept(42, 3.0)
    assert (seq.tokens[-1], seq.total, seq.assumed) == (42, 7, 1)


def test_progress_is_what_was_never_computed_before() -> None:
    seq = running_sequence()
    seq.launch(5, 1)
    assert seq.land(5, sample=True) is True
    seq.preempt()
    seq.start(1, 0, 4.0)
    seq.launch(3, 2)
    assert seq.land(3, sample=False) is False


def test_exhausted_when_the_last_token_is_on_its_way() -> None:
    seq = running_sequence()
    seq.launch(5, 1)
    for step in range(2, 11):
        assert not seq.exhausted
        seq.launch(1, step)
    assert seq.exhausted
    assert seq.total == seq.rules.max_total


def test_pinned_after_so_many_preemptions_but_not_by_restarts() -> None:
    seq = running_sequence()
    for _ in range(MAX_PREEMPTIONS):
        seq.preempt(counted=False)
        seq.start(0, 0, 2.0)
    assert not seq.pinned
    for _ in range(MAX_PREEMPTIONS):
        assert not seq.pinned
        seq.preempt()
        seq.start(0, 0, 2.0)
    assert seq.pinned


def test_the_first_start_tells_what_was_cached() -> None:
    seq = make_sequence(9)
    seq.start(0, 8, 3.0)
    seq.preempt()
    seq.start(0, 4, 5.0)
    assert seq.cached_tokens == 8
    assert seq.started_at == 3.0


def test_no_start_while_results_are_out() -> None:
    seq = running_sequence()
    seq.launch(5, 1)
    seq.preempt()
    with pytest.raises(AssertionError, match="in flight"):
        seq.start(0, 0, 3.0)
    seq.land(5, sample=True)
    seq.start(0, 0, 3.0)


def test_illegal_moves() -> None:
    seq = make_sequence()
    with pytest.raises(AssertionError, match="waiting to preempted"):
        seq.preempt()
    seq.finish()
    with pytest.raises(AssertionError, match="finished to finished"):
        seq.finish()
    with pytest.raises(AssertionError, match="finished to running"):
        seq.start(0, 0, 1.0)


def test_times_of_a_whole_life() -> None:
    seq = running_sequence()
    seq.accept(1, 4.0)
    seq.accept(2, 9.0)
    times = seq.times(9.0)
    assert (times.queued, times.prefill, times.decode, times.preemptions) == (1.0, 2.0, 5.0, 0)


def test_times_of_one_that_never_ran() -> None:
    times = make_sequence().times(4.0)
    assert (times.queued, times.prefill, times.decode) == (3.0, 0.0, 0.0)


def test_times_go_on_from_an_earlier_core_that_gave_no_token() -> None:
    seq = make_sequence(earlier=RequestTimes(10.0, 0.0, 0.0, 0))
    assert seq.times(2.0) == RequestTimes(11.0, 0.0, 0.0, 0)
    seq.start(0, 0, 4.0)
    seq.accept(1, 6.0)
    seq.accept(2, 9.0)
    assert seq.times(9.0) == RequestTimes(13.0, 2.0, 3.0, 0)


def test_times_go_on_from_an_earlier_core_that_gave_tokens() -> None:
    """Its first token is the first: what a later core does until its own is decode, and an outage is too."""
    seq = make_sequence(output=2, earlier=RequestTimes(10.0, 20.0, 30.0, 1))
    assert seq.times(2.0) == RequestTimes(10.0, 20.0, 31.0, 1)
    seq.start(0, 0, 4.0)
    seq.preempt()
    seq.start(0, 0, 5.0)
    seq.accept(1, 6.0)
    seq.accept(2, 9.0)
    assert seq.times(9.0) == RequestTimes(10.0, 20.0, 38.0, 2)


def test_violations_name_the_request_and_the_rule() -> None:
    seq = running_sequence()
    seq.held = []
    assert seq.violations() == ["request r1: violated: blocks exactly while running"]
    assert seq.status is Status.RUNNING
