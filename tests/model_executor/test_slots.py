from __future__ import annotations

import dataclasses

import pytest
import torch
from msgspec import structs

from engine_core.wire.codec import pack_ids
from engine_core.wire.errors import MalformedFrame
from engine_core.wire.executor import Row, SlotFill
from engine_core.wire.sampling import SamplingParams
from model_executor.batch import BatchIndex, SentIndex, build_index, send
from model_executor.errors import PlanInvalid
from model_executor.slots import SlotLimits, Slots

LIMITS = SlotLimits(
    max_num_seqs=3,
    max_model_len=10,
    block_size=4,
    num_blocks=(8,),
    vocab_size=50,
    sample_vocab_size=48,
    eos_token_ids=(2, 49),
)
GREEDY = SamplingParams(temperature=0.0)


def make_slots(*, debug: bool = False) -> Slots:
    return Slots(LIMITS, torch.device("cpu"), debug=debug)


def fill(slot: int = 0, ids: list[int] | None = None, **given: object) -> SlotFill:
    tokens = [7, 8, 9] if ids is None else ids
    values = {"prompt_len": len(tokens), "params": GREEDY, "seed": 1, "blocks": [[0]], **given}
    return SlotFill(slot, pack_ids(tokens), **values)  # type: ignore[arg-type]  # each test gives the right types


def index_of(slots: Slots, *rows: Row) -> BatchIndex:
    return build_index(slots.rows(rows), slots.block_tables[0], LIMITS.block_size)


def sent(index: BatchIndex) -> SentIndex:
    return send(index, torch.device("cpu"))


def test_tokens_are_read_back_and_chained() -> None:
    slots = make_slots()
    slots.fill(fill(1, blocks=[[5]]))
    first = index_of(slots, Row(1, 0, 3, [], True))
    assert slots.gather(sent(first)).tolist() == [7, 8, 9]
    slots.write(sent(first), torch.tensor([33]))
    second = index_of(slots, Row(1, 3, 1, [], True))
    assert slots.gather(sent(second)).tolist() == [33]
    slots.write(sent(second), torch.tensor([34]))
    third = index_of(slots, Row(1, 4, 1, [[2]], True))
    assert slots.gather(sent(third)).tolist() == [34]
    assert third.slot_mapping.tolist() == [2 * 4]
    assert third.block_tables.tolist() == [[5, 2]]


def test_the_last_token_of_a_full_sequence_has_a_place() -> None:
    slots = make_slots()
    slots.fill(fill(ids=list(range(10)), blocks=[[0, 1, 2]]))
    index = index_of(slots, Row(0, 0, 10, [], True))
    assert index.sample_positions.tolist() == [10]
    slots.write(sent(index), torch.tensor([1]))


def test_a_fill_forgets_what_was_there() -> None:
    slots = make_slots(debug=True)
    slots.fill(fill(ids=[1, 2, 3, 4, 5], blocks=[[0, 1]]))
    slots.fill(fill(ids=[6], blocks=[[7]]))
    assert slots.block_tables[0][0].tolist() == [7, 8, 8]
    assert slots.gather(sent(index_of(slots, Row(0, 0, 1, [], True)))).tolist() == [6]
    with pytest.raises(PlanInvalid, match="token ids fed: -1"):
        slots.gather(sent(index_of(slots, Row(0, 0, 2, [], True))))


def test_debug_refuses_a_token_outside_the_vocabulary() -> None:
    slots = make_slots(debug=True)
    slots.fill(fill())
    index = index_of(slots, Row(0, 0, 3, [], True))
    slots.write(sent(index), torch.tensor([50]))
    with pytest.raises(PlanInvalid, match=r"token ids fed: 50: allowed is 0 \.\. 49"):
        slots.gather(sent(index_of(slots, Row(0, 3, 1, [], True))))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (fill(3), "fills.slot"),
        (fill(-1), "fills.slot"),
        (fill(ids=[]), "length"),
        (fill(ids=list(range(11))), "length"),
        (fill(ids=[50]), "token_ids"),
        (fill(ids=[-1]), "token_ids"),
        (fill(blocks=[[8]]), "blocks"),
        (fill(blocks=[[-1]]), "blocks"),
        (fill(blocks=[[0, 1, 2, 3]]), "blocks of a slot"),
    ],
)
def test_fills_outside_the_tables(wrong: SlotFill, field: str) -> None:
    with pytest.raises(PlanInvalid, match=field):
        make_slots().fill(wrong)


def test_a_fill_with_cut_token_ids() -> None:
    with pytest.raises(MalformedFrame):
        make_slots().fill(SlotFill(0, b"\0\0\0", 1, GREEDY, 0, []))


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([], "rows"),
        ([Row(3, 0, 1, [], True)], r"rows\.slot"),
        ([Row(-1, 0, 1, [], True)], r"rows\.slot"),
        ([Row(0, 0, 1, [], True), Row(0, 1, 1, [], True)], "each slot once"),
        ([Row(0, -1, 1, [], True)], "start"),
        ([Row(0, 0, 0, [], True)], "count"),
        ([Row(0, 0, 11, [[1, 2]], True)], "at most 10"),
        ([Row(0, 4, 1, [], True)], "within the slot's blocks"),
        ([Row(1, 0, 1, [], True)], "within the slot's blocks"),
        ([Row(0, 4, 1, [[8]], True)], "blocks"),
        ([Row(0, 4, 1, [[1, 2, 3]], True)], "blocks of a slot"),
    ],
)
def test_rows_outside_the_tables(rows: list[Row], field: str) -> None:
    slots = make_slots()
    slots.fill(fill())
    with pytest.raises(PlanInvalid, match=field):
        slots.rows(rows)


def test_sampling_parameters_follow_the_slot() -> None:
    slots = make_slots()
    params = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, logprobs=3)
    slots.fill(fill(2, params=params, seed=2**63 - 1))
    slots.fill(fill(0))
    rows = slots.sampling(index_of(slots, Row(0, 2, 1, [], True), Row(2, 0, 3, [], True)))
    assert rows.greedy.tolist() == [True, False]
    assert (rows.temperature[1], rows.top_k[1], rows.top_p[1], rows.min_p[1]) == (0.5, 4, 0.9, 0.1)
    assert rows.seeds.tolist() == [1, 2**63 - 1]
    assert rows.positions.tolist() == [3, 3]
    assert rows.logprobs.tolist() == [-1, 3]
    assert rows.banned_rows.size == 0


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-30, True), (1e-4, True), (1.1e-4, False)])
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    slots = make_slots()
    slots.fill(fill(params=SamplingParams(temperature=temperature)))
    assert slots.sampling(index_of(slots, Row(0, 0, 3, [], True))).greedy.tolist() == [greedy]


def test_min_tokens_bans_ends_until_so_many_tokens_are_out() -> None:
    slots = make_slots()
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(5, 2, 48))
    slots.fill(fill(0, params=params))
    slots.fill(fill(1, blocks=[[1]], params=structs.replace(params, ignore_eos=True)))

    def banned(position: int) -> list[tuple[int, int]]:
        rows = slots.sampling(index_of(slots, Row(0, position - 1, 1, [], True), Row(1, position - 1, 1, [], True)))
        return list(zip(rows.banned_rows.tolist(), rows.banned_ids.tolist(), strict=True))

    # Ids 48 and 49 are never sampled anyway.
    assert banned(3) == banned(4) == [(0, 2), (0, 5), (1, 2), (1, 5)]
    slots.rows([Row(0, 0, 1, [[2]], False), Row(1, 0, 1, [[3]], False)])
    assert banned(5) == []


def test_output_of_a_resumed_sequence_counts_as_output() -> None:
    slots = make_slots()
    slots.fill(fill(ids=[7, 8, 9], prompt_len=1, params=SamplingParams(temperature=0.0, min_tokens=2)))
    assert slots.sampling(index_of(slots, Row(0, 0, 3, [], True))).banned_ids.size == 0


def grouped() -> Slots:
    return Slots(dataclasses.replace(LIMITS, num_blocks=(8, 3)), torch.device("cpu"))


def test_each_group_has_its_own_table() -> None:
    slots = grouped()
    slots.fill(fill(1, blocks=[[5, 6], [2]], held_from=[0, 1]))
    assert [table[1].tolist() for table in slots.block_tables] == [[5, 6, 8], [3, 2, 3]]
    slots.rows([Row(1, 8, 1, [[7], [0]], False)])
    assert [table[1].tolist() for table in slots.block_tables] == [[5, 6, 7], [3, 2, 0]]
    slots.fill(fill(1, blocks=[[1], []]))
    assert [table[1].tolist() for table in slots.block_tables] == [[1, 8, 8], [3, 3, 3]]
    with pytest.raises(PlanInvalid, match="within the slot's blocks"):
        slots.rows([Row(1, 0, 1, [], False)])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"blocks": [[1]]}, "KV groups of blocks: 1: allowed is 2"),
        ({"blocks": [[1], [3]]}, r"blocks: 3: allowed is 0 \.\. 2"),
        ({"blocks": [[1], [2]], "held_from": [0]}, "held_from length: 1: allowed is 2"),
        ({"blocks": [[1], [2]], "held_from": [0, 3]}, r"held_from: 3: allowed is 0 \.\. 2"),
        ({"blocks": [[1], [1, 2]], "held_from": [0, 2]}, "blocks of a slot: 4: allowed is at most 3"),
    ],
)
def test_blocks_must_fit_the_groups(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(PlanInvalid, match=text):
        grouped().fill(fill(**wrong))  # type: ignore[arg-type]  # each case gives the right types
