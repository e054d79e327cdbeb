"""What the executor remembers between steps: for each slot its tokens, its block table and how it is sampled.

Tokens live on the device, so that a step may feed on what the step before sampled without the host having seen it.
Block tables and sampling parameters live on the host, where batches are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_core.wire.codec import unpack_ids
from engine_core.wire.executor import Row, SlotFill
from model_executor.batch import BatchIndex, Ints, SentIndex, StepRows, on_device
from model_executor.errors import PlanInvalid
from model_executor.sampler import SampleRows

UNWRITTEN = -1
NO_IDS: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class SlotLimits:
    """Sizes of the tables.

    Attributes:
        max_num_seqs: slots.
        max_model_len: tokens a sequence.
        block_size: tokens a block.
        num_blocks: of each KV group; that number is the id of its scratch block.
        vocab_size: ids that may be fed.
        sample_vocab_size: ids that may be sampled; at most vocab_size.
        eos_token_ids: banned, with a request's stop ids, while it has fewer than min_tokens.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: tuple[int, ...]
    vocab_size: int
    sample_vocab_size: int
    eos_token_ids: tuple[int, ...]


class Slots:
    """See the module.

    Args:
        limits: sizes.
        device: where the token table lives.
        debug: mark unwritten tokens and refuse to launch a step that would read one, or any id outside the
            vocabulary. It waits for the device.

    Attributes:
        block_tables: for each KV group [slots, blocks of the longest sequence]; entries that hold nothing are the
            scratch block.
    """

    def __init__(self, limits: SlotLimits, device: torch.device, *, debug: bool = False) -> None:
        count = limits.max_num_seqs
        width = -(-limits.max_model_len // limits.block_size)
        self._limits = limits
        self._debug = debug
        self._tokens = torch.zeros((count, limits.max_model_len + 1), dtype=torch.int32, device=device)
        self.block_tables: tuple[npt.NDArray[np.int32], ...] = tuple(
            np.full((count, width), scratch, dtype=np.int32) for scratch in limits.num_blocks
        )
        self._num_blocks = np.zeros((len(limits.num_blocks), count), dtype=np.int64)
        self._greedy = np.ones(count, dtype=np.bool_)
        self._temperature, self._top_p, self._min_p = (np.ones(count) for _ in range(3))
        self._top_k, self._seeds, self._prompt_lens, self._min_tokens, self._logprobs = (
            np.zeros(count, dtype=np.int64) for _ in range(5)
        )
        self._banned = [NO_IDS] * count

    @property
    def nbytes(self) -> int:
        """Bytes of the token table on the device."""
        return self._tokens.nbytes

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self._limits.max_model_len

    def fill(self, fill: SlotFill) -> None:
        """Give a slot to a sequence.

        Raises:
            PlanInvalid: slot, tokens or blocks outside the tables.
        """
        slot = fill.slot
        _check_range("fills.slot", slot, self._limits.max_num_seqs)
        ids = np.asarray(unpack_ids(fill.token_ids), dtype=np.int32)
        if not 1 <= len(ids) <= self._limits.max_model_len:
            raise PlanInvalid("fills.token_ids length", f"1 .. {self._limits.max_model_len}", len(ids))
        known = (ids >= 0) & (ids < self._limits.vocab_size)
        _check_all("fills.token_ids", f"0 .. {self._limits.vocab_size - 1}", ids.astype(np.int64), known)
        if self._debug:
            self._tokens[slot, len(ids) :] = UNWRITTEN
        self._tokens[slot, : len(ids)] = on_device(ids, self._tokens.device)
        for table, scratch in zip(self.block_tables, self._limits.num_blocks, strict=True):
            table[slot] = scratch
        self._num_blocks[:, slot] = self._held_from(fill)
        self._append_blocks(slot, fill.blocks)
        self._remember(fill)

    def rows(self, rows: Sequence[Row]) -> StepRows:
        """The rows of a plan as arrays, once their new blocks stand in the tables.

        Raises:
            PlanInvalid: no rows, a slot twice, or a row outside its slot's blocks or the tables.
        """
        if not rows:
            raise PlanInvalid("rows", "at least one", 0)
        flat = np.array([(row.slot, row.start, row.count, row.sample) for row in rows], dtype=np.int64)
        slots, starts, counts, samples = flat.T
        limits = self._limits
        _check_all("rows.slot", f"0 .. {limits.max_num_seqs - 1}", slots, (slots >= 0) & (slots < limits.max_num_seqs))
        if len(np.unique(slots)) != len(slots):
            raise PlanInvalid("rows.slot", "each slot once", sorted(slots.tolist()))
        for row in rows:
            if row.blocks:
                self._append_blocks(row.slot, row.blocks)
        _check_all("rows.start", "0 or more", starts, starts >= 0)
        _check_all("rows.count", "1 or more", counts, counts >= 1)
        ends = starts + counts
        _check_all("rows.start + rows.count", f"at most {limits.max_model_len}", ends, ends <= limits.max_model_len)
        held = self._num_blocks[:, slots].min(axis=0) * limits.block_size
        _check_all("rows.start + rows.count", "within the slot's blocks", ends, ends <= held)
        return StepRows(slots, starts, counts, samples.astype(np.bool_))

    def gather(self, sent: SentIndex) -> Tensor:
        """Token ids of a batch, int64 [T] on the device.

        Raises:
            PlanInvalid: with `debug`: an id that was never written, or is outside the vocabulary.
        """
        ids = self._tokens[sent.token_slots, sent.positions].long()
        if self._debug:
            wrong = ids[(ids < 0) | (ids >= self._limits.vocab_size)]
            if len(wrong):
                raise PlanInvalid("token ids fed", f"0 .. {self._limits.vocab_size - 1}", wrong[0].item())
        return ids

    def write(self, sent: SentIndex, token_ids: Tensor) -> None:
        """Put sampled tokens [S] where the next step reads them."""
        self._tokens.index_put_((sent.sample_slots, sent.sample_positions), token_ids.int())

    def sampling(self, index: BatchIndex) -> SampleRows:
        """How the rows that sample are sampled, in the plan's order."""
        slots, positions = index.sample_slots, index.sample_positions
        young = np.flatnonzero(positions - self._prompt_lens[slots] < self._min_tokens[slots])
        banned = [self._banned[slots[row]] for row in young]
        return SampleRows(
            greedy=self._greedy[slots],
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seeds=self._seeds[slots],
            positions=positions,
            logprobs=self._logprobs[slots],
            banned_rows=np.repeat(young, np.array([len(ids) for ids in banned], dtype=np.int64)),
            banned_ids=np.concatenate(banned) if banned else NO_IDS,
        )

    def _held_from(self, fill: SlotFill) -> Sequence[int]:
        """For each KV group the place of the first block held."""
        groups, width = len(self.block_tables), self.block_tables[0].shape[1]
        first = fill.held_from or [0] * groups
        if len(first) != groups:
            raise PlanInvalid("fills.held_from length", str(groups), len(first))
        for place in first:
            _check_range("fills.held_from", place, width)
        return first

    def _append_blocks(self, slot: int, blocks: Sequence[Sequence[int]]) -> None:
        if len(blocks) != len(self.block_tables):
            raise PlanInvalid("KV groups of blocks", str(len(self.block_tables)), len(blocks))
        for group, (table, limit) in enumerate(zip(self.block_tables, self._limits.num_blocks, strict=True)):
            ids = np.asarray(blocks[group], dtype=np.int64)
            _check_all("blocks", f"0 .. {limit - 1}", ids, (ids >= 0) & (ids < limit))
            first = self._num_blocks[group, slot]
            last = first + len(ids)
            if last > table.shape[1]:
                raise PlanInvalid("blocks of a slot", f"at most {table.shape[1]}", int(last))
            table[slot, first:last] = ids
            self._num_blocks[group, slot] = last

    def _remember(self, fill: SlotFill) -> None:
        slot, params = fill.slot, fill.params
        self._greedy[slot] = params.greedy
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = fill.seed
        self._prompt_lens[slot] = fill.prompt_len
        self._min_tokens[slot] = params.min_tokens
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._limits.eos_token_ids)
        known = [token for token in ends if token < self._limits.sample_vocab_size]
        self._banned[slot] = np.array(sorted(set(known)), dtype=np.int64)


def _check_range(field: str, value: int, limit: int) -> None:
    if not 0 <= value < limit:
        raise PlanInvalid(field, f"0 .. {limit - 1}", value)


def _check_all(field: str, allowed: str, values: Ints, valid: npt.NDArray[np.bool_]) -> None:
    if not valid.all():
        raise PlanInvalid(field, allowed, int(values[~valid][0]))
