"""The ledger of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.block_pool import BlockPool, Ledger


class Named:
    """Stands for the prefix cache: which blocks have a name."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.forgotten: list[int] = []

    def forget(self, block: int) -> None:
        self.blocks.remove(block)
        self.forgotten.append(block)


def make_pool(total: int) -> tuple[BlockPool, Named]:
    named = Named()
    return BlockPool(total, named.blocks.__contains__, named.forget), named


def test_take_and_release() -> None:
    pool, _ = make_pool(4)
    blocks = pool.take(3)
    assert sorted(blocks) == [0, 1, 2]
    assert pool.ledger() == Ledger(free=1, cached=0, owned=3, total=4)
    pool.release(blocks)
    assert pool.ledger() == Ledger(free=4, cached=0, owned=0, total=4)


def test_a_shared_block_is_free_after_the_last_holder() -> None:
    pool, _ = make_pool(2)
    blocks = pool.take(2)
    pool.share(blocks[:1])
    assert pool.exclusive(blocks) == 1
    pool.release(blocks)
    assert pool.available == 1
    pool.release(blocks[:1])
    assert pool.available == 2


def test_named_blocks_stay_findable_until_they_are_needed() -> None:
    pool, named = make_pool(3)
    blocks = pool.take(2)
    named.blocks |= set(blocks)
    pool.release(blocks)
    assert pool.ledger() == Ledger(free=1, cached=2, owned=0, total=3)
    pool.share(blocks)
    assert pool.ledger() == Ledger(free=1, cached=0, owned=2, total=3)
    pool.release(blocks)
    assert named.forgotten == []
    assert pool.take(3)[1:] == [blocks[1], blocks[0]], "the end of a prefix goes before its beginning"
    assert named.forgotten == [blocks[1], blocks[0]]


def test_the_least_recently_used_is_evicted_first() -> None:
    pool, named = make_pool(3)
    first, second, third = pool.take(3)
    named.blocks |= {first, second, third}
    for block in (second, first, third):
        pool.release([block])
    pool.share([second])
    pool.release([second])
    assert pool.take(3) == [first, third, second]


def test_more_than_available_is_an_error_of_the_caller() -> None:
    pool, _ = make_pool(2)
    with pytest.raises(AssertionError, match="3 blocks taken, 2 available"):
        pool.take(3)


def test_double_release_is_an_error_of_the_caller() -> None:
    pool, _ = make_pool(2)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="does not hold"):
        pool.release(blocks)


def test_violations_show_wrong_holders() -> None:
    pool, _ = make_pool(2)
    blocks = pool.take(1)
    assert pool.violations([blocks]) == []
    assert pool.violations([]) == [f"block {blocks[0]}: 1 references, 0 holders"]
    pool.release(blocks)
    assert pool.violations([blocks]) == [f"block {blocks[0]}: 0 references, 1 holders"]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=60))
def test_any_sequence_of_acts_keeps_the_ledger(acts: list[tuple[int, int]]) -> None:
    pool, named = make_pool(6)
    holders: list[list[int]] = []
    for act, number in acts:
        if act == 0 and number <= pool.available:
            holders.append(pool.take(number))
        elif act == 1 and holders:
            pool.release(holders.pop(number % len(holders)))
        elif act == 2 and holders:
            chosen = holders[number % len(holders)]
            pool.share(chosen)
            holders.append(list(chosen))
        elif act == 3 and holders:
            named.blocks |= set(holders[number % len(holders)])
        assert pool.violations(holders) == []
        held = {block for table in holders for block in table}
        assert pool.ledger().owned == len(held)
        assert not pool.free_blocks() & held
