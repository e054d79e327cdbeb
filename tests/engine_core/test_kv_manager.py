"""Blocks for sequences: prefix hits, growth, the way back."""

from __future__ import annotations

from array import array

from engine_core.kv_manager import KVManager
from engine_core.sequence import MAX_PREEMPTIONS, Sequence
from tests.engine_core.test_sequence import make_sequence


def make_kv(blocks: int = 8, *, caching: bool = True) -> KVManager:
    return KVManager(blocks, 4, prefix_caching=caching)


def settle(kv: KVManager, seq: Sequence) -> None:
    """All tokens of the sequence are computed."""
    kv.commit(seq, len(seq.tokens))


def drop(kv: KVManager, seq: Sequence) -> None:
    kv.free(kv.detach(seq))


def test_admission_gives_blocks_for_all_tokens() -> None:
    kv, seq = make_kv(), make_sequence(9)
    assert kv.admit(seq, 0) == (0, 0)
    assert len(seq.table) == 3
    assert kv.ledger().owned == 3


def test_admission_says_how_many_blocks_lack() -> None:
    kv, seq = make_kv(4), make_sequence(16)
    assert kv.admit(seq, 2) == (2, 0)
    assert kv.lacking(seq, 2) == 2
    assert seq.table == []
    assert kv.ledger().owned == 0
    assert kv.admit(seq, 0) == (0, 0)


def test_a_whole_hit_leaves_a_token_to_compute() -> None:
    """A prompt that is an exact multiple of the block, cached in full."""
    kv, first, second = make_kv(), make_sequence(8), make_sequence(8, order=2)
    kv.admit(first, 0)
    settle(kv, first)
    assert kv.admit(second, 0) == (0, 4)
    assert second.table[0] == first.table[0]
    assert second.table[1] != first.table[1]


def test_only_full_and_settled_blocks_are_shared() -> None:
    kv, first, second = make_kv(), make_sequence(11), make_sequence(11, order=2)
    kv.admit(first, 0)
    assert kv.admit(second, 0) == (0, 0)
    drop(kv, second)
    kv.commit(first, 7)
    assert kv.admit(second, 0) == (0, 4)
    drop(kv, second)
    kv.commit(first, 11)
    assert kv.admit(second, 0) == (0, 8)


def test_salts_do_not_share() -> None:
    kv = make_kv(20)
    salted = [make_sequence(9, order=order, salt=salt) for order, salt in enumerate((None, "a", "b", "a"))]
    found = []
    for seq in salted:
        found.append(kv.admit(seq, 0)[1])
        settle(kv, seq)
    assert found == [0, 0, 0, 8]


def test_generated_tokens_are_shared_too() -> None:
    kv, first = make_kv(), make_sequence(6)
    kv.admit(first, 0)
    first.tokens.extend([7, 8, 9])
    assert kv.grow(first, 9) is not None
    kv.commit(first, 8)
    second = make_sequence(6, order=2)
    second.tokens = array("i", first.tokens)
    assert kv.admit(second, 0) == (0, 8)


def test_released_blocks_are_found_again() -> None:
    kv, first, second = make_kv(), make_sequence(9), make_sequence(9, order=2)
    kv.admit(first, 0)
    settle(kv, first)
    drop(kv, first)
    assert (kv.ledger().owned, kv.ledger().cached) == (0, 2)
    assert kv.available == 8
    assert kv.admit(second, 0) == (0, 8)


def test_a_hit_on_unheld_blocks_uses_up_what_is_available() -> None:
    """Two of three available blocks are the hit itself: only one is left for new tokens."""
    kv, first, holder = make_kv(6), make_sequence(8), make_sequence(12, order=2, salt="other")
    kv.admit(first, 0)
    settle(kv, first)
    drop(kv, first)
    kv.admit(holder, 0)
    long = make_sequence(16, order=3)
    assert kv.available == 3
    assert kv.admit(long, 0) == (1, 0)
    assert kv.admit(make_sequence(12, order=4), 0) == (0, 8)


def test_growth_is_by_need() -> None:
    kv, seq = make_kv(3), make_sequence(4)
    kv.admit(seq, 0)
    assert kv.grow(seq, 4) == []
    blocks = kv.grow(seq, 5)
    assert blocks is not None
    assert seq.table[1:] == blocks
    assert kv.grow(seq, 13) is None
    assert len(seq.table) == 2


def test_a_pinned_sequence_gets_all_it_can_ever_need() -> None:
    kv, seq = make_kv(), make_sequence(5)
    for _ in range(MAX_PREEMPTIONS):
        seq.start(0, 0, 1.0)
        seq.preempt()
    assert kv.admit(seq, 0) == (0, 0)
    assert len(seq.table) == 4
    assert kv.grow(seq, seq.rules.max_total) == []


def test_without_caching_nothing_is_kept() -> None:
    kv, first = make_kv(caching=False), make_sequence(9)
    kv.admit(first, 0)
    settle(kv, first)
    drop(kv, first)
    assert kv.ledger().cached == 0
    assert kv.admit(make_sequence(9, order=2), 0) == (0, 0)


def test_detached_blocks_stay_owned() -> None:
    kv, seq = make_kv(), make_sequence(9)
    kv.admit(seq, 0)
    blocks = kv.detach(seq)
    assert kv.ledger().owned == 3
    assert kv.gain(blocks) == 3
    assert kv.violations([], [blocks]) == []
    kv.free(blocks)
    assert kv.free_blocks() == frozenset(range(8))


def test_a_block_cached_for_other_tokens_is_noticed() -> None:
    kv, seq = make_kv(), make_sequence(9)
    kv.admit(seq, 0)
    settle(kv, seq)
    assert kv.violations([seq], []) == []
    seq.hashes[0] = bytes(32)
    assert kv.violations([seq], []) == [f"request r1: block 0 ({seq.table[0]}) is cached for other tokens"]
