"""From a step plan to the tensors of one forward pass.

Host side first: index lists are numpy arrays made from the plan and the block tables alone, so they are tested without
a device. Rows are put in an order that suits attention: rows of one token first, longest context first, then the
others as planned. `sample_index` keeps the plan's order, so nobody outside sees the sorting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class StepRows:
    """Rows of a plan in the plan's order, as arrays of one length R.

    Attributes:
        slots: row of the token table and of the block table.
        starts: tokens computed before.
        counts: tokens computed now, at least 1.
        samples: bool: whether the last position gives a token.
    """

    slots: Ints
    starts: Ints
    counts: Ints
    samples: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class DecodeGroup:
    """Neighbouring decode rows of like context length, which a kernel may pad to one length.

    Attributes:
        first, last: rows first .. last - 1; a decode row r owns token r.
        context_len: of the longest row, the first; every row holds more than half as many blocks.
    """

    first: int
    last: int
    context_len: int


@dataclass(frozen=True)
class GroupIndex:
    """What depends on the KV group: see BatchIndex.

    Attributes:
        slot_mapping: [T].
        block_tables: [R, B].
    """

    slot_mapping: Ints
    block_tables: Ints


@dataclass(frozen=True)
class BatchIndex:
    """Index lists of one forward pass of T tokens in R rows, S of which sample.

    Attributes:
        token_slots, positions: [T] where each token stands in the token table; positions count from 0.
        slot_mapping: [T] where its key and value go: block * block_size + offset.
        query_start: [R + 1] first token of each row; the last entry is T.
        context_lens: [R] tokens of the row in the cache after this step.
        block_tables: [R, B] block ids in order; entries past a row's context, and before its window, are valid ids of
            any block.
        sample_index: [S] the last token of each row that samples, in the plan's order.
        sample_slots, sample_positions: [S] where the sampled token goes in the token table.
        num_decodes: rows 0 .. num_decodes - 1 compute one token each.
        decode_groups: they cover these rows in order.
        others: slot_mapping and block_tables of the KV groups after the first.
    """

    token_slots: Ints
    positions: Ints
    slot_mapping: Ints
    query_start: Ints
    context_lens: Ints
    block_tables: Ints
    sample_index: Ints
    sample_slots: Ints
    sample_positions: Ints
    num_decodes: int
    decode_groups: tuple[DecodeGroup, ...]
    others: tuple[GroupIndex, ...] = ()


@dataclass(frozen=True)
class SentIndex:
    """The index lists of a BatchIndex as int64 tensors on the device.

    Attributes:
        others: slot_mapping and block_tables of the KV groups after the first.
        token_slots, positions, slot_mapping, query_start, context_lens, block_tables, sample_index, sample_slots,
            sample_positions: as there.
    """

    others: tuple[tuple[Tensor, Tensor], ...]
    token_slots: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    sample_index: Tensor
    sample_slots: Tensor
    sample_positions: Tensor


@dataclass(frozen=True)
class BatchInputs:
    """What a model's forward pass reads. T tokens of all rows stand one after the other, in row order.

    Attributes:
        token_ids, positions, slot_mapping: int64 [T].
        query_start: int64 [R + 1].
        context_lens: int64 [R]; the query of row r ends at position context_lens[r] - 1.
        block_tables: int64 [R, B].
        sample_index: int64 [S].
        query_lens, context_lens_host: [R], on the host.
        num_decodes: the first rows, of one token each.
        decode_groups: cover the decode rows in order.
        others: the same batch for the layers of the KV groups after the first: they differ in slot_mapping,
            block_tables and derived.
        derived: what kernels made of this batch, see `once`.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    sample_index: Tensor
    query_lens: list[int]
    context_lens_host: list[int]
    num_decodes: int
    decode_groups: tuple[DecodeGroup, ...]
    others: tuple[BatchInputs, ...] = ()
    derived: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    def of_group(self, group: int) -> BatchInputs:
        """The batch for the layers of a KV group."""
        return self.others[group - 1] if group else self

    def with_groups(self, others: Iterable[tuple[Tensor, Tensor]]) -> BatchInputs:
        """The batch with (slot_mapping, block_tables) of the KV groups after the first."""
        made = (replace(self, slot_mapping=slots, block_tables=tables, derived={}) for slots, tables in others)
        return replace(self, others=tuple(made))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once a step instead of once a layer. Equal keys must mean equal values."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]  # type: ignore[return-value]  # the value that this very key's make gave


def build_index(
    rows: StepRows, block_table: npt.NDArray[np.int32], block_size: int, *others: npt.NDArray[np.int32]
) -> BatchIndex:
    """The index lists of a plan.

    Args:
        rows: at least one; slots are distinct.
        block_table: [slots, blocks a sequence]; row s holds the block ids of slot s in order.
        block_size: tokens a block.
        others: block tables of the KV groups after the first.
    """
    contexts = rows.starts + rows.counts
    order = np.lexsort((np.where(rows.counts == 1, -contexts, 0), rows.counts != 1))
    slots, starts, counts, contexts = (a[order] for a in (rows.slots, rows.starts, rows.counts, contexts))
    query_start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    token_slots = np.repeat(slots, counts)
    positions = np.arange(query_start[-1], dtype=np.int64) + np.repeat(starts - query_start[:-1], counts)
    width = -(-int(contexts.max()) // block_size)

    def of_group(table: npt.NDArray[np.int32]) -> GroupIndex:
        blocks = table[token_slots, positions // block_size].astype(np.int64)
        return GroupIndex(blocks * block_size + positions % block_size, table[slots, :width].astype(np.int64))

    group = of_group(block_table)
    num_decodes = int(np.count_nonzero(counts == 1))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    sampled = np.flatnonzero(rows.samples)
    return BatchIndex(
        token_slots=token_slots,
        positions=positions,
        slot_mapping=group.slot_mapping,
        query_start=query_start,
        context_lens=contexts,
        block_tables=group.block_tables,
        sample_index=query_start[place[sampled] + 1] - 1,
        sample_slots=rows.slots[sampled],
        sample_positions=(rows.starts + rows.counts)[sampled],
        num_decodes=num_decodes,
        decode_groups=_groups(contexts[:num_decodes], block_size),
        others=tuple(of_group(table) for table in others),
    )


def send(index: BatchIndex, device: torch.device) -> SentIndex:
    """The index lists on a device, in one copy: each copy by itself would take it longer than the numbers do."""
    arrays = [index.token_slots, index.positions, index.slot_mapping, index.query_start, index.context_lens]
    arrays += [index.block_tables, index.sample_index, index.sample_slots, index.sample_positions]
    count = len(arrays)
    for group in index.others:
        arrays += [group.slot_mapping, group.block_tables]
    sent = together_on_device(arrays, device)
    return SentIndex(tuple(zip(sent[count::2], sent[count + 1 :: 2], strict=True)), *sent[:count])


def to_inputs(index: BatchIndex, token_ids: Tensor, sent: SentIndex | None = None) -> BatchInputs:
    """The tensors of `index` on the device of `token_ids`.

    Args:
        index: of the step.
        token_ids: int64 [T], already gathered from the token table.
        sent: the same index on the device; None: it is sent now.
    """
    sent = sent or send(index, token_ids.device)
    batch = BatchInputs(
        token_ids=token_ids,
        positions=sent.positions,
        slot_mapping=sent.slot_mapping,
        query_start=sent.query_start,
        context_lens=sent.context_lens,
        block_tables=sent.block_tables,
        sample_index=sent.sample_index,
        query_lens=np.diff(index.query_start).tolist(),
        context_lens_host=index.context_lens.tolist(),
        num_decodes=index.num_decodes,
        decode_groups=index.decode_groups,
    )
    return batch.with_groups(sent.others) if sent.others else batch


def together_on_device(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """See on_device; elsewhere than on CPU the tensors are parts of one."""
    if device.type == "cpu":
        return [on_device(array, device) for array in arrays]
    flat = on_device(np.concatenate([array.ravel() for array in arrays]), device)
    parts = torch.split(flat, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def on_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor of `array`. On CPU it shares the memory. Elsewhere the host's memory may be reused at once, and nobody
    waits for the device: what it reads is a copy in pinned memory, which torch keeps until it has been read.
    """
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _groups(contexts: Ints, block_size: int) -> tuple[DecodeGroup, ...]:
    """Cut rows of falling context length where a row holds half the blocks of its group's first, or fewer."""
    blocks = -(-contexts // block_size)
    groups = []
    first = 0
    while first < len(blocks):
        last = first + int(np.count_nonzero(blocks[first:] * 2 > blocks[first]))
        groups.append(DecodeGroup(first, last, int(contexts[first])))
        first = last
    return tuple(groups)
