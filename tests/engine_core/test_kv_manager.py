"""Blocks for sequences: prefix hits, growth, the way back."""

from __future__ import annotations

from array import array

from engine_core.kv_manager import KVManager
from engine_core.sequence import MAX_PREEMPTIONS, Sequence
from engine_core.wire.executor import KvGroup
from tests.engine_core.test_sequence import make_sequence


def make_kv(blocks: int = 8, *, caching: bool = True) -> KVManager:
    return KVManager([KvGroup(None, blocks)], 4, most_tokens=16, prefix_caching=caching)


def settle(kv: KVManager, seq: Sequence) -> None:
    """All tokens of the sequence are computed."""
    kv.commit(seq, len(seq.tokens))


def drop(kv: KVManager, seq: Sequence) -> None:
    kv.free(kv.detach(seq))


def test_admission_gives_blocks_for_all_tokens() -> None:
    kv, seq = make_kv(), make_sequence(9)
    assert kv.admit(seq, 0) == ((), 0)
    assert len(seq.held[0].table) == 3
    assert kv.ledger().owned == 3


def test_a_whole_sequence_gets_neighbours_to_its_end() -> None:
    """Ten blocks are three whole sequences of nine tokens, and one block that nobody can have."""
    kv = KVManager([KvGroup(None, 10)], 4, most_tokens=16, prefix_caching=False, whole=9)
    seqs = [make_sequence(count, order=count) for count in (1, 9, 5, 2, 4)]
    for seq in seqs[:3]:
        assert kv.has_spare(2)
        assert kv.admit(seq, 2) == ((), 0)
    assert not kv.has_spare(0)
    assert kv.admit(seqs[3], 0) == ((2,), 0)
    assert kv.grow(seqs[0], 9) == []
    drop(kv, seqs[1])
    drop(kv, seqs[0])
    for seq in seqs[3:]:
        assert kv.admit(seq, 2) == ((), 0)
    assert [seq.held[0].table for seq in seqs[2:]] == [[6, 7, 8], [0, 1, 2], [3, 4, 5]]
    assert kv.violations(seqs[2:], []) == []
    seqs[2].held[0].table[1:] = [8, 7]
    assert kv.violations(seqs[2:], []) == ["request r5: its blocks are no 3 neighbours"]
    seqs[2].held[0].table[1:] = [7]
    assert kv.violations(seqs[2:], [])[-1] == "request r5: its blocks are no 3 neighbours"


def test_admission_says_how_many_blocks_lack() -> None:
    kv, seq = make_kv(4), make_sequence(16)
    assert kv.admit(seq, 2) == ((2,), 0)
    assert kv.lacking(seq, 2) == (2,)
    assert seq.held == []
    assert kv.ledger().owned == 0
    assert kv.admit(seq, 0) == ((), 0)


def test_a_whole_hit_leaves_a_token_to_compute() -> None:
    """A prompt that is an exact multiple of the block, cached in full."""
    kv, first, second = make_kv(), make_sequence(8), make_sequence(8, order=2)
    kv.admit(first, 0)
    settle(kv, first)
    assert kv.admit(second, 0) == ((), 4)
    assert second.held[0].table[0] == first.held[0].table[0]
    assert second.held[0].table[1] != first.held[0].table[1]


def test_only_full_and_settled_blocks_are_shared() -> None:
    kv, first, second = make_kv(), make_sequence(11), make_sequence(11, order=2)
    kv.admit(first, 0)
    assert kv.admit(second, 0) == ((), 0)
    drop(kv, second)
    kv.commit(first, 7)
    assert kv.admit(second, 0) == ((), 4)
    drop(kv, second)
    kv.commit(first, 11)
    assert kv.admit(second, 0) == ((), 8)


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
    assert kv.admit(second, 0) == ((), 8)


def test_released_blocks_are_found_again() -> None:
    kv, first, second = make_kv(), make_sequence(9), make_sequence(9, order=2)
    kv.admit(first, 0)
    settle(kv, first)
    drop(kv, first)
    assert (kv.ledger().owned, kv.ledger().cached) == (0, 2)
    assert kv.available == 8
    assert kv.admit(second, 0) == ((), 8)


def test_a_hit_on_unheld_blocks_uses_up_what_is_available() -> None:
    """Two of three available blocks are the hit itself: only one is left for new tokens."""
    kv, first, holder = make_kv(6), make_sequence(8), make_sequence(12, order=2, salt="other")
    kv.admit(first, 0)
    settle(kv, first)
    drop(kv, first)
    kv.admit(holder, 0)
    long = make_sequence(16, order=3)
    assert kv.available == 3
    assert kv.admit(long, 0) == ((1,), 0)
    assert kv.admit(make_sequence(12, order=4), 0) == ((), 8)


def test_growth_is_by_need() -> None:
    kv, seq = make_kv(3), make_sequence(4)
    kv.admit(seq, 0)
    assert kv.grow(seq, 4) == []
    blocks = kv.grow(seq, 5)
    assert blocks is not None
    assert [seq.held[0].table[1:]] == blocks
    assert kv.grow(seq, 13) is None
    assert len(seq.held[0].table) == 2


def test_a_pinned_sequence_gets_all_it_can_ever_need() -> None:
    kv, seq = make_kv(), make_sequence(5)
    for _ in range(MAX_PREEMPTIONS):
        seq.start(0, 0, 1.0)
        seq.preempt()
    assert kv.admit(seq, 0) == ((), 0)
    assert len(seq.held[0].table) == 4
    assert kv.grow(seq, seq.rules.max_total) == []


def test_without_caching_nothing_is_kept() -> None:
    kv, first = make_kv(caching=False), make_sequence(9)
    kv.admit(first, 0)
    settle(kv, first)
    drop(kv, first)
    assert kv.ledger().cached == 0
    assert kv.admit(make_sequence(9, order=2), 0) == ((), 0)


def test_detached_blocks_stay_owned() -> None:
    kv, seq = make_kv(), make_sequence(9)
    kv.admit(seq, 0)
    blocks = kv.detach(seq)
    assert kv.ledger().owned == 3
    assert kv.gain(blocks) == (3,)
    assert kv.violations([], [blocks]) == []
    kv.free(blocks)
    assert kv.free_blocks() == [frozenset(range(8))]


def test_a_block_cached_for_other_tokens_is_noticed() -> None:
    kv, seq = make_kv(), make_sequence(9)
    kv.admit(seq, 0)
    settle(kv, seq)
    assert kv.violations([seq], []) == []
    seq.hashes[0] = bytes(32)
    assert kv.violations([seq], []) == [f"request r1: block 0 ({seq.held[0].table[0]}) is cached for other tokens"]


def make_mixed(full: int = 40, window: int = 6, blocks: int = 20) -> KVManager:
    return KVManager([KvGroup(None, full), KvGroup(window, blocks)], 4, most_tokens=16, prefix_caching=True)


def compute(kv: KVManager, seq: Sequence, tokens: int) -> None:
    """All tokens of the sequence in steps of `tokens`, each of which comes back at once."""
    while seq.computed < len(seq.tokens):
        count = kv.room(seq, min(tokens, len(seq.tokens) - seq.computed))
        assert count
        assert kv.grow(seq, seq.computed + count) is not None
        seq.launch(count, 1)
        seq.land(seq.computed, sample=seq.assumed > 0)
        kv.commit(seq, seq.computed)
        assert kv.violations([seq], []) == []


def begin(kv: KVManager, seq: Sequence) -> int:
    """Admit and start it; the tokens found."""
    lacking, found = kv.admit(seq, 0)
    assert not lacking
    seq.start(0, found, 1.0)
    return found


def test_each_group_counts_by_itself() -> None:
    kv, seq = make_mixed(full=9, blocks=5), make_sequence(40)
    assert kv.lacking(seq, 0) == (1, 0)
    assert kv.admit(seq, 0) == ((1, 0), 0)
    assert seq.held == []
    seq = make_sequence(36)
    assert begin(kv, seq) == 0
    assert [len(holding.table) for holding in seq.held] == [9, 0]
    assert kv.gain(seq.held) == (9, 3)
    assert not kv.has_spare(0)


def test_blocks_behind_the_window_wait_for_the_last_step_that_reads_them() -> None:
    kv, seq = make_mixed(), make_sequence(40)
    begin(kv, seq)
    for step in (1, 2):
        count = kv.room(seq, 16)
        assert count == 16
        kv.grow(seq, seq.computed + count)
        seq.launch(count, step)
    assert kv.room(seq, 8) == 8
    # The next query, at 32, sees from token 27 on: block 6 is the first it needs.
    assert (seq.held[1].live, seq.held[1].freed) == (6, 0)
    seq.land(16, sample=False)
    kv.commit(seq, 16)
    kv.landed(1)
    assert seq.held[1].freed == 2, "what the second step left behind was read by the first one last"
    seq.land(32, sample=False)
    kv.commit(seq, 32)
    kv.landed(2)
    assert (seq.held[1].freed, seq.held[0].freed) == (6, 0)
    assert kv.violations([seq], []) == []
    assert kv.ledger().cached == 6


def test_what_is_detached_takes_along_what_it_left_behind() -> None:
    kv, seq = make_mixed(), make_sequence(40)
    begin(kv, seq)
    kv.grow(seq, kv.room(seq, 16))
    seq.launch(16, 1)
    kv.room(seq, 8)
    held = kv.detach(seq)
    assert kv.violations([], [held]) == []
    kv.landed(1)
    assert kv.violations([], [held]) == []
    kv.free(held)
    assert kv.ledger().owned == 0
    assert kv.violations([], []) == []


def test_a_hit_is_what_all_groups_know() -> None:
    kv, first = make_mixed(), make_sequence(41)
    begin(kv, first)
    compute(kv, first, 8)
    drop(kv, first)
    second = make_sequence(41, order=2)
    assert begin(kv, second) == 40
    assert [(holding.freed, len(holding.table)) for holding in second.held] == [(0, 11), (8, 10)]
    assert kv.violations([second], []) == []
    drop(kv, second)
    shorter = make_sequence(22, order=3)
    assert begin(kv, shorter) == 20, "what left the window long ago is found"


def test_a_hit_ends_where_the_window_has_been_overwritten() -> None:
    kv, first = make_mixed(blocks=12), make_sequence(41)
    begin(kv, first)
    compute(kv, first, 4)
    drop(kv, first)
    other = make_sequence(60, order=2, salt="other")
    begin(kv, other)
    compute(kv, other, 4)
    drop(kv, other)
    again = make_sequence(41, order=3)
    assert begin(kv, again) == 0
    compute(kv, again, 4)


def test_a_model_whose_layers_all_slide_keeps_little_of_a_long_prompt() -> None:
    kv = KVManager([KvGroup(5, 8), KvGroup(9, 10)], 4, most_tokens=4, prefix_caching=False)
    seq = make_sequence(95)
    begin(kv, seq)
    compute(kv, seq, 4)
    assert [len(holding.blocks) for holding in seq.held] == [2, 3]
    assert kv.chunk_tokens == 4


def test_room_is_what_the_extra_part_allows() -> None:
    kv = KVManager([KvGroup(6, 5)], 4, most_tokens=64, prefix_caching=False)
    seq = make_sequence(60)
    begin(kv, seq)
    assert kv.room(seq, 60) == 5 * 4
    kv.grow(seq, 20)
    seq.launch(20, 1)
    assert kv.room(seq, 40) == 0, "all of it waits for the step that is out"
    seq.land(20, sample=False)
    kv.landed(1)
    assert kv.room(seq, 40) == 3 * 4
