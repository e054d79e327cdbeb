"""Starting, preempting and ending, and what is held meanwhile."""

from __future__ import annotations

import pytest

from engine_core.admission import Limits
from engine_core.flight import Draft
from engine_core.policy import Policy
from engine_core.roster import Lacking, Roster
from engine_core.sequence import Sequence, Status
from engine_core.wire.codec import unpack_ids
from engine_core.wire.config import CacheOptions, SchedulerOptions
from engine_core.wire.executor import KvGroup, SlotFill, StepResult
from tests.engine_core.test_sequence import make_sequence


def make_roster(*, blocks: int = 8, rows: int = 2, budget: int = 16, policy: Policy = "fcfs") -> Roster:
    limits = Limits(100, 50, (KvGroup(None, blocks),), 4, rows, budget)
    return Roster(SchedulerOptions(scheduling_policy=policy), CacheOptions(), limits, 1)


def started(roster: Roster, seq: Sequence) -> SlotFill:
    roster.enqueue(seq)
    fill = roster.start(seq, 2.0)
    assert isinstance(fill, SlotFill)
    return fill


def launch(roster: Roster, seq: Sequence, count: int) -> None:
    draft = Draft(roster.flights.next_step(), 100)
    draft.add(seq, count, [])
    roster.flights.launch(draft.rows)


def land(roster: Roster, seq: Sequence, step: int, end: int) -> None:
    roster.flights.land(StepResult(1, step, [9], None, 0, 1))
    seq.land(end, sample=True)
    seq.accept(9, 3.0)
    roster.lift_fence(step)


def test_a_start_fills_a_slot_with_all_that_is_known() -> None:
    roster, seq = make_roster(), make_sequence(5)
    fill = started(roster, seq)
    assert (fill.slot, fill.prompt_len, fill.seed) == (seq.slot, 5, seq.seed)
    assert unpack_ids(fill.token_ids) == seq.tokens
    assert fill.blocks == [seq.held[0].table]
    assert fill.blocks[0] is not seq.held[0].table
    assert fill.held_from == []
    assert roster.violations() == []


def test_no_row_no_start() -> None:
    roster = make_roster(rows=1)
    started(roster, make_sequence(order=1))
    second = make_sequence(order=2)
    roster.enqueue(second)
    assert roster.start(second, 2.0) == Lacking(())
    assert roster.violations() == []


def test_never_more_rows_than_tokens_in_a_step() -> None:
    roster = make_roster(rows=2, budget=1)
    started(roster, make_sequence(order=1))
    assert not roster.has_row()


def test_a_start_leaves_each_row_a_block_to_grow() -> None:
    roster = make_roster(blocks=4)
    started(roster, make_sequence(5, order=1))
    second = make_sequence(5, order=2)
    roster.enqueue(second)
    assert roster.start(second, 2.0) == Lacking((1,))


def test_slot_and_blocks_wait_for_the_last_plan_that_uses_them() -> None:
    roster, seq = make_roster(rows=1), make_sequence(5)
    started(roster, seq)
    launch(roster, seq, 5)
    launch(roster, seq, 1)
    roster.preempt(seq)
    assert roster.kv.ledger().owned == 2
    assert not roster.has_row()
    assert roster.fence.gain == [2]
    assert roster.violations() == []
    land(roster, seq, 1, 5)
    assert roster.kv.ledger().owned == 2
    land(roster, seq, 2, 6)
    assert roster.kv.ledger().owned == 0
    assert roster.has_row()
    assert roster.violations() == []


def test_a_preempted_sequence_waits_for_its_own_results() -> None:
    roster, seq = make_roster(), make_sequence(5)
    started(roster, seq)
    launch(roster, seq, 5)
    roster.preempt(seq)
    assert roster.start(seq, 3.0) == Lacking(())
    land(roster, seq, 1, 5)
    assert isinstance(roster.start(seq, 3.0), SlotFill)


def test_without_plans_out_all_is_free_at_once() -> None:
    roster, seq = make_roster(), make_sequence(5)
    started(roster, seq)
    roster.finish(seq, "abort")
    assert roster.kv.ledger().owned == 0
    assert (roster.live, len(roster.running), len(roster.fence)) == ({}, 0, 0)
    assert roster.counters.finished == {"abort": 1}


@pytest.mark.parametrize("status", [Status.WAITING, Status.RUNNING, Status.PREEMPTED])
def test_one_way_out_of_every_status(status: Status) -> None:
    roster, seq = make_roster(), make_sequence(5)
    roster.enqueue(seq)
    if status is not Status.WAITING:
        roster.start(seq, 2.0)
    if status is Status.PREEMPTED:
        roster.preempt(seq)
    assert seq.status is status
    roster.finish(seq, "stop")
    assert seq.status is Status.FINISHED
    assert len(roster.queue) == 0
    assert roster.violations() == []


def test_a_restart_forgets_what_was_out_and_keeps_the_requests() -> None:
    roster, runs, waits = make_roster(), make_sequence(5), make_sequence(5, order=2)
    started(roster, runs)
    launch(roster, runs, 5)
    roster.enqueue(waits)
    roster.restart(2)
    assert roster.queue.in_order() == [runs, waits]
    assert (runs.status, runs.in_flight, runs.assumed, runs.preemptions) == (Status.PREEMPTED, 0, 0, 0)
    assert (roster.flights.epoch, roster.flights.next_step()) == (2, 1)
    assert roster.kv.ledger().free == 8
    assert roster.violations() == []


def test_violations_see_a_lost_slot() -> None:
    roster, seq = make_roster(), make_sequence(5)
    started(roster, seq)
    seq.slot = 0 if seq.slot else 1
    assert any("slots" in violation for violation in roster.violations())


def test_who_starts_out_of_turn_by_age_is_remembered() -> None:
    roster = make_roster(policy="priority")
    old, urgent = make_sequence(order=1, priority=9), make_sequence(order=2, priority=0)
    roster.enqueue(old)
    roster.enqueue(urgent)
    assert isinstance(roster.start(old, 20.0), SlotFill)
    assert isinstance(roster.start(urgent, 20.0), SlotFill)
    assert (old.aged, urgent.aged) == (True, False)
    assert roster.running.yielding_to(make_sequence(order=3, priority=-1)) == [urgent]
    roster.preempt(old)
    roster.start(old, 21.0)
    assert old.aged, "and stays so"
