"""What a step holds."""

from __future__ import annotations

from engine_core.admission import Limits
from engine_core.flight import Draft
from engine_core.planner import START_SHARE, Planner
from engine_core.roster import Roster
from engine_core.sequence import Sequence
from engine_core.wire.config import CacheOptions, SchedulerOptions
from engine_core.wire.executor import KvGroup
from tests.engine_core.test_sequence import make_sequence


class Engine:
    """A roster and its planner; plans stay out until `land`."""

    def __init__(
        self, *, budget: int = 16, rows: int = 4, blocks: int = 64, threshold: int = 0, mixed: int = 1000
    ) -> None:
        options = SchedulerOptions(long_prefill_token_threshold=threshold, mixed_prefill_token_threshold=mixed)
        limits = Limits(200, 50, (KvGroup(None, blocks),), 4, rows, budget)
        self.roster = Roster(options, CacheOptions(), limits, 1)
        self.planner = Planner(self.roster, options, limits)

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.roster.enqueue(seq)

    def plan(self) -> dict[int, int]:
        """Tokens by order of the sequence."""
        draft: Draft = self.planner.plan(2.0)
        self.roster.flights.launch(draft.rows)
        return {seq.order: row.count for seq, row in draft.rows}


def prompt(length: int, order: int) -> Sequence:
    return make_sequence(length, order=order)


def test_a_prompt_alone_has_the_whole_budget() -> None:
    engine = Engine()
    engine.add(prompt(40, 1))
    assert [engine.plan() for _ in range(4)] == [{1: 16}, {1: 16}, {1: 8}, {1: 1}]


def test_decode_and_prefill_share_a_step() -> None:
    engine = Engine()
    engine.add(prompt(5, 1))
    assert engine.plan() == {1: 5}
    engine.add(prompt(20, 2))
    assert engine.plan() == {1: 1, 2: 15}
    assert engine.plan() == {1: 1, 2: 5}


def test_prompts_beside_sequences_that_generate_get_part_of_the_budget() -> None:
    engine = Engine(budget=96, mixed=0)
    engine.add(prompt(2, 1), prompt(3, 2))
    assert engine.plan() == {1: 2, 2: 3}
    engine.add(prompt(40, 3))
    assert engine.plan() == {1: 1, 2: 1, 3: 96 // 16}
    engine.add(prompt(40, 4))
    # A share of the step is kept for the one that starts.
    assert engine.plan() == {1: 1, 2: 1, 3: 4, 4: 2}


def test_while_more_wait_than_generate_prompts_get_half_the_budget() -> None:
    engine = Engine(budget=96, rows=3, mixed=0)
    engine.add(prompt(2, 1))
    engine.plan()
    engine.add(*(prompt(90, order) for order in range(2, 12)))
    for _ in range(2):
        planned = engine.plan()
        assert (planned[1], sum(planned.values())) == (1, 1 + 96 // 2)


def test_requests_that_could_not_start_do_not_count_as_waiting() -> None:
    engine = Engine(budget=96, rows=2, mixed=0)
    engine.add(prompt(2, 1))
    engine.plan()
    engine.add(*(prompt(90, order) for order in range(2, 12)))
    assert sum(engine.plan().values()) == 1 + 96 // 2
    assert engine.plan() == {1: 1, 2: 96 // 16}


def test_the_share_of_prompts_beside_sequences_that_generate_can_be_set() -> None:
    engine = Engine(mixed=7)
    engine.add(prompt(2, 1))
    engine.plan()
    engine.add(prompt(40, 2))
    assert [engine.plan() for _ in range(2)] == [{1: 1, 2: 7}, {1: 1, 2: 7}]


def test_every_prompt_gets_a_token_beside_sequences_that_generate() -> None:
    engine = Engine(mixed=1, threshold=2)
    engine.add(prompt(2, 1), *(prompt(20, order) for order in range(2, 5)))
    assert engine.plan().keys() == {1, 2, 3, 4}
    assert engine.plan() == {1: 1, 2: 1, 3: 1, 4: 1}


def test_while_others_wait_a_prompt_has_half_the_budget() -> None:
    engine = Engine()
    engine.add(prompt(40, 1), prompt(6, 2))
    assert engine.plan() == {1: 8, 2: 6}


def test_the_chunk_cap_can_be_set() -> None:
    engine = Engine(threshold=3)
    engine.add(prompt(40, 1), prompt(40, 2))
    assert engine.plan() == {1: 3, 2: 13}
    assert engine.plan() == {1: 3, 2: 3}


def test_whoever_cannot_start_does_not_shorten_chunks() -> None:
    engine = Engine(rows=1)
    engine.add(prompt(40, 1), prompt(40, 2))
    assert engine.plan() == {1: 16}
    assert engine.planner.lacks_capacity


def test_running_prompts_leave_a_share_for_a_start() -> None:
    engine = Engine()
    engine.add(prompt(60, 1), prompt(60, 2))
    assert engine.plan() == {1: 8, 2: 8}
    engine.add(prompt(60, 3))
    assert engine.plan() == {1: 8, 2: 16 - 8 - 16 // START_SHARE, 3: 16 // START_SHARE}
    assert not engine.planner.lacks_capacity


def test_every_row_gets_a_token_however_small_the_budget() -> None:
    engine = Engine(budget=3, rows=8)
    engine.add(*(prompt(9, order) for order in range(1, 6)))
    engine.plan()
    engine.plan()
    assert engine.plan() == {1: 1, 2: 1, 3: 1}


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert Engine().plan() == {}


def test_one_row_yields_when_two_have_filled_the_pool() -> None:
    """While its blocks are on their way nobody else is preempted, and nobody starts."""
    engine = Engine(blocks=4)
    engine.add(prompt(4, 1), prompt(4, 2))
    engine.plan()
    engine.plan()
    assert engine.roster.kv.available == 0
    engine.add(prompt(1, 3))
    for _ in range(3):
        engine.plan()
    assert engine.plan() == {}
    assert engine.roster.counters.preemptions == 1
    assert [seq.order for seq in engine.roster.queue.in_order()] == [2, 3]


def test_the_blocks_of_a_new_row_travel_with_its_fill() -> None:
    engine = Engine()
    seq = prompt(9, 1)
    engine.add(seq)
    draft = engine.planner.plan(2.0)
    assert [fill.blocks for fill in draft.fills] == [[seq.held[0].table]]
    assert [row.blocks for _, row in draft.rows] == [[]]
    engine.roster.flights.launch(draft.rows)
    counts = [len(row.blocks) for _ in range(8) for _, row in engine.planner.plan(2.0).rows]
    assert counts == [0, 0, 0, 1, 0, 0, 0, 1]


def test_nobody_passes_a_head_whose_blocks_are_on_their_way() -> None:
    engine = Engine(blocks=6)
    runs, head, small = prompt(13, 1), prompt(20, 2), prompt(1, 3)
    engine.add(runs)
    engine.plan()
    engine.roster.finish(runs, "abort")
    engine.add(head, small)
    assert engine.roster.kv.available == 2
    assert engine.plan() == {}
    assert engine.roster.queue.in_order() == [head, small]


def test_a_head_that_lacks_more_is_passed() -> None:
    engine = Engine(blocks=6)
    runs, head, small = prompt(13, 1), prompt(20, 2), prompt(1, 3)
    engine.add(runs)
    engine.plan()
    engine.add(head, small)
    assert engine.plan() == {1: 1, 3: 1}
    assert head.passed == 1
