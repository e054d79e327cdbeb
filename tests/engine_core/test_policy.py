"""Order, ageing, batches, and when to come back."""

from __future__ import annotations

import pytest

from engine_core.policy import (
    AGEING_S,
    AGEING_SHARE,
    BYPASS_WINDOW,
    MIXED_ROWS,
    BatchGate,
    MixedShare,
    RetryEstimate,
    RunningRows,
    WaitingQueue,
)
from engine_core.sequence import MAX_PREEMPTIONS, Sequence
from tests.engine_core.test_sequence import make_sequence


def preempted(order: int, priority: int = 0, times: int = 1) -> Sequence:
    seq = make_sequence(order=order, priority=priority)
    for _ in range(times):
        seq.start(0, 0, 1.0)
        seq.preempt()
    return seq


def orders(found: list[Sequence]) -> list[int]:
    return [seq.order for seq in found]


def test_fcfs_knows_no_priority_but_preempted_go_first() -> None:
    queue = WaitingQueue("fcfs", "continuous")
    for seq in (make_sequence(order=3, priority=-9), make_sequence(order=2), preempted(8), preempted(5, 7)):
        queue.push(seq)
    assert orders(queue.in_order()) == [5, 8, 2, 3]


def test_priority_then_preempted_then_arrival() -> None:
    queue = WaitingQueue("priority", "continuous")
    for seq in (make_sequence(order=3, priority=1), make_sequence(order=4), preempted(8), preempted(5, 1)):
        queue.push(seq)
    assert orders(queue.in_order()) == [8, 4, 5, 3]


def test_in_static_batches_preempted_members_come_before_all() -> None:
    queue = WaitingQueue("priority", "static")
    for seq in (make_sequence(order=3, priority=-5), preempted(5, 9)):
        queue.push(seq)
    assert orders(queue.in_order()) == [5, 3]


def test_the_queue_counts_its_tokens_and_knows_the_oldest() -> None:
    queue = WaitingQueue("priority", "continuous")
    old, urgent = make_sequence(4, order=1, priority=5), make_sequence(6, order=2, priority=0)
    queue.push(urgent)
    queue.push(old)
    assert queue.tokens == 10
    assert queue.oldest() is old
    assert queue.first() is urgent
    queue.remove(old)
    assert (queue.tokens, queue.oldest(), len(queue)) == (6, urgent, 1)
    queue.remove(urgent)
    assert (queue.first(), queue.oldest(), queue.pick(0, 0.0)) == (None, None, None)


def test_one_start_in_so_many_goes_to_an_old_request() -> None:
    queue = WaitingQueue("priority", "continuous")
    old, urgent = make_sequence(order=1, priority=5), make_sequence(order=2, priority=0)
    queue.push(urgent)
    queue.push(old)
    late = old.arrival + AGEING_S
    picks = [queue.pick(starts, late) for starts in range(AGEING_SHARE * 2)]
    assert picks.count(old) == 2
    assert all(queue.pick(starts, late - 0.1) is urgent for starts in range(AGEING_SHARE * 2))


def test_removing_a_stranger_is_an_error_of_the_caller() -> None:
    queue = WaitingQueue("fcfs", "continuous")
    queue.push(make_sequence(order=1))
    with pytest.raises(AssertionError, match="is not queued"):
        queue.remove(make_sequence(order=1))


def test_behind_a_blocked_head_all_have_their_turn() -> None:
    queue = WaitingQueue("fcfs", "continuous")
    sequences = [make_sequence(order=order) for order in range(100)]
    for seq in sequences:
        queue.push(seq)
    seen: set[int] = set()
    for _ in range(-(-100 // BYPASS_WINDOW)):
        turn = orders(queue.others(sequences[0]))
        assert len(turn) <= 2 * BYPASS_WINDOW
        assert turn == sorted(turn)
        assert set(range(1, BYPASS_WINDOW + 1)) <= set(turn)
        seen |= set(turn)
    assert seen == set(range(1, 100))


def test_victims_are_the_latest_of_the_least_urgent() -> None:
    rows = RunningRows("priority")
    for seq in (
        make_sequence(order=1, priority=2),
        make_sequence(order=2, priority=9),
        make_sequence(order=3, priority=9),
        make_sequence(order=4, priority=0),
    ):
        rows.add(seq)
    victim = rows.victim()
    assert victim is not None
    assert victim.order == 3
    rows.remove(victim)
    assert orders(rows.in_order()) == [4, 1, 2]


def test_under_fcfs_the_latest_yields() -> None:
    rows = RunningRows("fcfs")
    for seq in (make_sequence(order=2, priority=9), make_sequence(order=3, priority=0)):
        rows.add(seq)
    victim = rows.victim()
    assert victim is not None
    assert victim.order == 3


def test_pinned_rows_are_no_victims() -> None:
    rows = RunningRows("fcfs")
    rows.add(preempted(7, times=MAX_PREEMPTIONS))
    assert rows.victim() is None
    rows.add(make_sequence(order=1))
    victim = rows.victim()
    assert victim is not None
    assert victim.order == 1


def test_only_less_urgent_rows_yield_and_no_aged_ones() -> None:
    rows = RunningRows("priority")
    aged = make_sequence(order=3, priority=9)
    aged.aged = True
    for seq in (make_sequence(order=1, priority=4), make_sequence(order=2, priority=9), aged):
        rows.add(seq)
    assert orders(rows.yielding_to(make_sequence(order=4, priority=4))) == [2]
    assert orders(rows.yielding_to(make_sequence(order=4, priority=0))) == [2, 1]
    assert rows.yielding_to(make_sequence(order=4, priority=9)) == []


def test_the_gate_of_continuous_batching_is_always_open() -> None:
    gate = BatchGate("continuous")
    gate.close()
    gate.refresh(batch_alive=True)
    assert gate.admits(make_sequence())


def test_the_gate_of_static_batching() -> None:
    gate = BatchGate("static")
    assert gate.admits(make_sequence())
    gate.close()
    gate.refresh(batch_alive=True)
    assert not gate.admits(make_sequence())
    assert gate.admits(preempted(1))
    gate.refresh(batch_alive=False)
    assert gate.admits(make_sequence())


def test_retry_follows_the_rate_of_starts() -> None:
    estimate = RetryEstimate()
    assert estimate.seconds(100, 0.0) == 1.0
    for second in range(10):
        estimate.note_start(float(second))
    assert estimate.seconds(40, 10.0) == pytest.approx(10.0)
    assert estimate.seconds(1, 10.0) == 1.0
    assert estimate.seconds(10_000, 10.0) == 60.0


@pytest.mark.parametrize(
    ("generating", "waiting", "expected"),
    [
        (1, 1, 32),
        (8, 8, 512 * 8 // MIXED_ROWS),
        (8, 9, 256),
        (10**4, 10, 256),
    ],
)
def test_prompts_get_more_beside_more_that_generate_and_most_while_more_wait(
    generating: int, waiting: int, expected: int
) -> None:
    assert MixedShare(512, 0).tokens(generating, waiting) == expected


def test_the_share_of_prompts_can_be_fixed() -> None:
    assert {MixedShare(512, 77).tokens(g, w) for g in (1, 50) for w in (1, 10**6)} == {77}


def test_prompts_get_a_token_of_the_smallest_budget() -> None:
    assert MixedShare(1, 0).tokens(1, 1) == 1
