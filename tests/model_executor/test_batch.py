from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_executor import batch as batch_module
from model_executor.batch import BatchIndex, DecodeGroup, SentIndex, StepRows, build_index, send, to_inputs

BLOCK = 4


def make_rows(*rows: tuple[int, int, int, bool]) -> StepRows:
    slots, starts, counts, samples = np.array(rows, dtype=np.int64).T
    return StepRows(slots, starts, counts, samples.astype(np.bool_))


def make_table(slots: int, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Slot s owns blocks 100 s, 100 s + 1, ..."""
    return (np.arange(slots)[:, None] * 100 + np.arange(width)).astype(np.int32)


def test_by_hand() -> None:
    rows = make_rows((2, 0, 3, True), (0, 5, 1, True), (1, 4, 2, False), (3, 9, 1, True))
    index = build_index(rows, make_table(4, 3), BLOCK)
    # Decode rows first, the longest context first: slots 3, 0, 2, 1.
    assert index.token_slots.tolist() == [3, 0, 2, 2, 2, 1, 1]
    assert index.positions.tolist() == [9, 5, 0, 1, 2, 4, 5]
    assert index.slot_mapping.tolist() == [302 * 4 + 1, 1 * 4 + 1, 800, 801, 802, 101 * 4, 101 * 4 + 1]
    assert index.query_start.tolist() == [0, 1, 2, 5, 7]
    assert index.context_lens.tolist() == [10, 6, 3, 6]
    assert index.block_tables.tolist() == [[300, 301, 302], [0, 1, 2], [200, 201, 202], [100, 101, 102]]
    # In the plan's order: slots 2, 0, 3.
    assert index.sample_index.tolist() == [4, 1, 0]
    assert index.sample_slots.tolist() == [2, 0, 3]
    assert index.sample_positions.tolist() == [3, 6, 10]
    assert index.num_decodes == 2
    assert index.decode_groups == (DecodeGroup(0, 2, 10),)


def test_groups_by_hand() -> None:
    starts = [63, 31, 30, 32, 7, 3, 0]
    index = build_index(
        make_rows(*((slot, start, 1, True) for slot, start in enumerate(starts))), make_table(7, 16), BLOCK
    )
    # Blocks 16 | 9, 8, 8 | 2 | 1, 1: a row with half the blocks of the first or fewer opens a group.
    assert index.decode_groups == (
        DecodeGroup(0, 2, 64),
        DecodeGroup(2, 4, 32),
        DecodeGroup(4, 5, 8),
        DecodeGroup(5, 7, 4),
    )


def token_by_token(rows: StepRows, table: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> set[tuple[int, int, int]]:
    """(slot, position, cache slot) of every token, the obvious way."""
    return {
        (int(slot), position, int(table[slot, position // BLOCK]) * BLOCK + position % BLOCK)
        for slot, start, count in zip(rows.slots, rows.starts, rows.counts, strict=True)
        for position in range(start, start + count)
    }


def check_order(index: BatchIndex) -> None:
    """Decode rows stand first, by falling context, in groups that cover them."""
    counts = np.diff(index.query_start)
    assert counts[: index.num_decodes].tolist() == [1] * index.num_decodes
    assert (counts[index.num_decodes :] > 1).all()
    decodes = index.context_lens[: index.num_decodes].tolist()
    assert decodes == sorted(decodes, reverse=True)
    ends = [0, *(group.last for group in index.decode_groups)]
    assert [group.first for group in index.decode_groups] == ends[:-1]
    assert ends[-1] == index.num_decodes
    for group in index.decode_groups:
        longest, shortest = decodes[group.first], decodes[group.last - 1]
        assert group.context_len == longest
        assert -(-shortest // BLOCK) * 2 > -(-longest // BLOCK)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9), st.booleans()), min_size=1, max_size=12), st.data())
def test_every_token_and_sample_is_right(plan: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    slots = data.draw(st.permutations(range(len(plan) + 3)))
    rows = make_rows(*((slot, *row) for slot, row in zip(slots, plan, strict=False)))
    table = make_table(len(plan) + 3, 18)
    index = build_index(rows, table, BLOCK)
    tokens = list(zip(index.token_slots.tolist(), index.positions.tolist(), index.slot_mapping.tolist(), strict=True))
    assert len(tokens) == int(rows.counts.sum())
    assert set(tokens) == token_by_token(rows, table)
    check_order(index)
    sampling = [(slot, start + count) for slot, (start, count, sample) in zip(slots, plan, strict=False) if sample]
    assert list(zip(index.sample_slots.tolist(), index.sample_positions.tolist(), strict=True)) == sampling
    last = [(int(index.token_slots[place]), int(index.positions[place]) + 1) for place in index.sample_index]
    assert last == sampling


def test_tensors_say_what_the_lists_say() -> None:
    index = build_index(make_rows((0, 0, 3, True), (1, 7, 1, False)), make_table(2, 3), BLOCK)
    batch = to_inputs(index, torch.tensor([5, 6, 7, 8]))
    assert batch.num_tokens == 4
    assert batch.query_lens == [1, 3]
    assert batch.context_lens_host == batch.context_lens.tolist() == [8, 3]
    for name in ("positions", "slot_mapping", "query_start", "context_lens", "block_tables", "sample_index"):
        tensor = getattr(batch, name)
        assert tensor.dtype == torch.int64
        assert tensor.tolist() == getattr(index, name).tolist()


def test_a_device_gets_all_lists_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[np.ndarray] = []

    def copied(array: np.ndarray, device: torch.device) -> torch.Tensor:
        copies.append(array)
        return torch.from_numpy(array.copy())

    rows = make_rows((0, 0, 3, True), (1, 7, 1, False))
    index = build_index(rows, make_table(2, 3), BLOCK, make_table(2, 3) + 50)
    here = send(index, torch.device("cpu"))
    monkeypatch.setattr(batch_module, "on_device", copied)
    there = send(index, torch.device("meta"))
    assert len(copies) == 1
    for name in SentIndex.__dataclass_fields__:
        one, other = getattr(here, name), getattr(there, name)
        if name == "others":
            one, other = one[0][1], other[0][1]
        assert torch.equal(one, other), name
    assert torch.equal(here.others[0][0], there.others[0][0])
    assert here.sample_slots.tolist() == index.sample_slots.tolist()


def test_what_kernels_derive_is_made_once_a_step() -> None:
    index = build_index(make_rows((0, 0, 1, True)), make_table(1, 1), BLOCK)
    made = [0]

    def make() -> int:
        made[0] += 1
        return made[0]

    first, second = (to_inputs(index, torch.zeros(1, dtype=torch.int64)) for _ in range(2))
    assert [batch.once("key", make) for batch in (first, first, second)] == [1, 1, 2]
    assert first.once("other", make) == 3


def test_groups_differ_in_tables_alone() -> None:
    rows = make_rows((2, 0, 3, True), (0, 5, 1, True))
    first, second = make_table(3, 3), make_table(3, 3) + 50
    index = build_index(rows, first, BLOCK, second)
    plain, other = build_index(rows, first, BLOCK), build_index(rows, second, BLOCK)
    assert index.slot_mapping.tolist() == plain.slot_mapping.tolist()
    assert plain.others == ()
    (group,) = index.others
    assert group.slot_mapping.tolist() == other.slot_mapping.tolist()
    assert group.block_tables.tolist() == other.block_tables.tolist()
    batch = to_inputs(index, torch.tensor([5, 6, 7, 8]))
    assert batch.of_group(0) is batch
    seen = batch.of_group(1)
    assert seen.slot_mapping.tolist() == other.slot_mapping.tolist()
    assert seen.block_tables.tolist() == other.block_tables.tolist()
    assert seen.positions is batch.positions
    assert [batch.once("key", lambda: 1), seen.once("key", lambda: 2)] == [1, 2], "what is derived depends on tables"
