"""What sequences hold of a full and of a sliding group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_group import FullGroup, Holding, SlidingGroup, extra_blocks, make_groups
from engine_core.wire.executor import KvGroup

SIZE = 4
NAMES = [bytes([number]) * 32 for number in range(40)]


def sliding(blocks: int = 20, window: int = 6, most_tokens: int = 8) -> SlidingGroup:
    return SlidingGroup(KvGroup(window, blocks), SIZE, most_tokens)


def computed(group: SlidingGroup, holding: Holding, tokens: int) -> None:
    """Go token by token up to `tokens`; nothing is in flight."""
    for done in range(tokens):
        group.leave_behind(holding, done)
        group.let_go(holding, holding.live)
        group.grow(holding, -(-(done + 1) // SIZE))
        assert group.violations([holding]) == []


def test_a_group_for_each_pool() -> None:
    made = make_groups([KvGroup(None, 7), KvGroup(6, 5)], SIZE, 8)
    assert [(type(group), group.pool.total) for group in made] == [(FullGroup, 7), (SlidingGroup, 5)]


def test_the_extra_part_is_for_the_chunks_of_two_plans() -> None:
    assert KvGroup(6, 0).steady_blocks(SIZE) == 3
    assert extra_blocks(KvGroup(6, 20), SIZE, 8) == 4
    assert extra_blocks(KvGroup(6, 20), SIZE, 9) == 5
    assert extra_blocks(KvGroup(6, 6), SIZE, 100) == 3, "half at most"
    assert extra_blocks(KvGroup(6, 4), SIZE, 100) == 1, "one sequence must be able to go on"
    assert extra_blocks(KvGroup(6, 2), SIZE, 100) == 0


@given(window=st.integers(1, 40), size=st.integers(1, 17), start=st.integers(0, 60))
def test_steady_blocks_hold_the_window_and_two_plans_wherever_blocks_begin(window: int, size: int, start: int) -> None:
    """The query of the older plan is at `start`, that of the newer one behind it."""
    steady = KvGroup(window, 0).steady_blocks(size)
    assert steady is not None
    first, last = max(0, start - window + 1) // size, (start + 1) // size
    assert last - first + 1 <= steady


def test_a_long_sequence_reserves_no_more_than_it_needs_to_go_on() -> None:
    group = sliding()
    short, long = group.admit(0, [], 2), group.admit(0, [], 30)
    assert (short.reserved, long.reserved) == (2, 3)
    assert group.lacking([], 30, 0) == 3 - (20 - 4 - 5)
    assert group.lacking([], 30, 9) == 3 + 1 - (20 - 4 - 5), "only the short one may still grow"
    assert group.spare(9) == 20 - 4 - 5 - 1
    assert group.violations([short, long]) == []


def test_the_blocks_held_stay_few_however_long_it_gets() -> None:
    group = sliding()
    holding = group.admit(0, [], 1)
    computed(group, holding, 100)
    assert len(holding.blocks) <= 3
    assert (len(holding.table), holding.reserved, holding.extra) == (25, 3, 0)
    group.free(holding)
    assert group.pool.ledger().free == 20
    assert group.violations([]) == []


def test_chunks_take_from_the_extra_part_until_it_is_used_up() -> None:
    group = sliding()
    holding = group.admit(0, [], 30)
    assert group.most(holding) == 3 + 4
    group.grow(holding, 5)
    assert (holding.extra, group.most(holding)) == (2, 7)
    other = group.admit(0, [], 30)
    assert group.most(other) == 3 + 2
    assert group.leave_behind(holding, 20)
    assert not group.leave_behind(holding, 20)
    assert (holding.live, holding.freed) == (3, 0), "until it is let go of it is held"
    group.let_go(holding, 3)
    assert (len(holding.blocks), holding.extra, group.most(other)) == (2, 0, 7)
    assert group.violations([holding, other]) == []


def test_what_left_the_window_is_found_again() -> None:
    group = sliding()
    holding = group.admit(0, [], 5)
    group.grow(holding, 5)
    group.settle(holding, NAMES, 0, 5)
    group.leave_behind(holding, 20)
    group.let_go(holding, holding.live)
    assert group.pool.ledger().cached == 3
    assert group.find(NAMES, 3) == (3, holding.table[1:3]), "the query at 12 sees from token 7 on"
    group.free(holding)
    again = group.admit(*group.find(NAMES, 5), 6)
    assert (again.freed, again.blocks) == (3, holding.table[3:5])


def test_a_hit_needs_only_what_the_window_sees() -> None:
    group = sliding()
    holding = group.admit(0, [], 3)
    group.grow(holding, 3)
    for index, place in enumerate((2, 3, 6)):
        group.cache.add(NAMES[place], holding.table[index])
    assert group.find(NAMES, 9)[0] == 4, "block 6 lacks its predecessor"
    assert group.find(NAMES, 4) == (4, holding.table[0:2])
    assert group.find(NAMES, 3) == (0, []), "so does block 2"


def test_letting_go_twice_is_once() -> None:
    group = sliding()
    holding = group.admit(0, [], 4)
    group.grow(holding, 4)
    group.free(holding)
    group.let_go(holding, 2)
    assert group.pool.ledger().free == 20


def test_growth_is_refused_by_what_is_promised() -> None:
    group = sliding(blocks=7, most_tokens=2)
    first, second = group.admit(0, [], 1), group.admit(0, [], 3)
    assert group.pool.available == 7
    assert (group.short(first, 3), group.short(first, 4)) == (0, 0)
    group.admit(0, [], 2)
    assert group.short(first, 2) == 1
    assert group.gain(second) == 3


@pytest.mark.parametrize("field", ["_reserved", "_extra", "_growing"])
def test_violations_see_a_wrong_count(field: str) -> None:
    group = sliding()
    holding = group.admit(0, [], 3)
    setattr(group, field, getattr(group, field) + 1)
    assert any("window 6" in violation for violation in group.violations([holding]))
