"""An executor in plain Python that notices every corruption: its KV memory holds for each position a digest of the
salt and of all tokens up to it, as the KV of a real model depends on all of them.

The next token of a sequence is a hash of all its tokens. For each KV group, all that the group's layers would read must
lie in its memory as the block table says: a wrong token, a wrong token before it, a wrong position, block, length,
order or salt trips a check. What is before the window is not looked at, and may hold anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

from engine_core.wire.codec import unpack_ids
from engine_core.wire.executor import KvGroup, Row, SlotFill, StepPlan, StepResult
from engine_core.wire.sampling import SamplingParams

POISON = -1


def next_token(tokens: array[int], prompt_len: int, params: SamplingParams, seed: int, model: Model) -> int:
    """What the model says after `tokens`: a hash, shifted past tokens that min_tokens bans."""
    banned = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos))
    young = len(tokens) - prompt_len < params.min_tokens
    choice = crc32(tokens.tobytes(), seed & 0xFFFFFFFF) % model.vocab
    while young and choice in banned:
        choice = (choice + 1) % model.vocab
    return choice


@dataclass(frozen=True)
class Model:
    """The size of the modelled device."""

    vocab: int
    eos: tuple[int, ...]
    groups: tuple[KvGroup, ...]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def room(self) -> int:
        """Tokens of the longest sequence: a pool bounds it, unless the pool holds a window and goes on for ever."""
        bounds = [group.most_tokens(self.block_size) for group in self.groups]
        return min([self.max_model_len, *(bound for bound in bounds if bound is not None)])


@dataclass
class _Slot:
    """Tables hold for each group the block at each place, and None where none is held; digests are of the tokens up
    to each one.
    """

    tokens: array[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    tables: list[list[int | None]]
    root: int
    digests: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.digest()

    def digest(self) -> None:
        """Digests of the tokens that have none."""
        for place in range(len(self.digests), len(self.tokens)):
            before = self.digests[-1] if self.digests else self.root
            self.digests.append(crc32(self.tokens[place : place + 1].tobytes(), before))


def _first_seen(group: KvGroup, position: int) -> int:
    return 0 if group.window is None else max(0, position - group.window + 1)


def tables(fill: SlotFill) -> list[list[int | None]]:
    """For each group the block at each place, and None where none is held."""
    starts = fill.held_from or [0] * len(fill.blocks)
    return [[None] * start + list(blocks) for start, blocks in zip(starts, fill.blocks, strict=True)]


class _Memory:
    """KV memory of one group."""

    def __init__(self, group: KvGroup, block_size: int) -> None:
        self.group = group
        self._size = block_size
        self._digests = array("q", [POISON]) * (group.num_blocks * block_size)
        self._positions = array("i", [POISON]) * (group.num_blocks * block_size)
        self._poisoned: frozenset[int] = frozenset()

    def poison(self, free: frozenset[int]) -> None:
        """Destroy what newly freed blocks hold."""
        for block in free - self._poisoned:
            for cell in range(block * self._size, (block + 1) * self._size):
                self._digests[cell] = self._positions[cell] = POISON
        self._poisoned = free

    def cell(self, table: list[int | None], position: int) -> int:
        """Where a position lies."""
        block = table[position // self._size]
        assert block is not None, "a place is used that is not held"
        return block * self._size + position % self._size

    def check(self, table: list[int | None], digests: list[int], query: int, end: int) -> None:
        """All that the query at position `query` sees of the positions before `end` is there."""
        for position in range(_first_seen(self.group, query), end):
            cell = self.cell(table, position)
            assert self._positions[cell] == position, "the cache holds other positions"
            assert self._digests[cell] == digests[position], "the cache holds other tokens"

    def write(self, table: list[int | None], digests: list[int], first: int, last: int) -> set[int]:
        """Store positions first .. last - 1; the cells written."""
        cells = set()
        for position in range(first, last):
            cell = self.cell(table, position)
            self._digests[cell], self._positions[cell] = digests[position], position
            cells.add(cell)
        return cells


class FakeExecutor:
    """Runs plans one after the other. Rows of one plan run at the same time: all read before any writes.

    Args:
        model: the size of the device.
        epoch: of the plans.
        salts: of requests, by their seeds.
    """

    def __init__(self, model: Model, epoch: int, salts: Mapping[int, str | None]) -> None:
        self.model = model
        self._salts = salts
        self.epoch = epoch
        self._memories = [_Memory(group, model.block_size) for group in model.groups]
        self._slots: dict[int, _Slot] = {}
        self._steps = 0

    def poison(self, free: list[frozenset[int]]) -> None:
        """Destroy what newly freed blocks hold; to be called whenever the scheduler may have freed or taken some."""
        for memory, blocks in zip(self._memories, free, strict=True):
            memory.poison(blocks)

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one plan."""
        self._steps += 1
        assert (plan.epoch, plan.step) == (self.epoch, self._steps)
        assert sum(row.count for row in plan.rows) <= self.model.max_num_batched_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows) <= self.model.max_num_seqs
        for fill in plan.fills:
            self._fill(fill)
        for row in plan.rows:
            self._read(row)
        self._write(plan.rows)
        sampled = [self._sample(row) for row in plan.rows if row.sample]
        return StepResult(plan.epoch, plan.step, sampled, None, 0, 1)

    def _fill(self, fill: SlotFill) -> None:
        assert 0 <= fill.slot < self.model.max_num_seqs
        assert len(fill.blocks) == len(self.model.groups)
        root = crc32(repr(self._salts[fill.seed]).encode())
        tokens = unpack_ids(fill.token_ids)
        self._slots[fill.slot] = _Slot(tokens, fill.prompt_len, fill.params, fill.seed, tables(fill), root)

    def _read(self, row: Row) -> None:
        slot, end = self._slots[row.slot], row.start + row.count
        assert row.count >= 1
        assert end <= len(slot.tokens), "a token is computed before it is known"
        assert len(row.blocks) in (0, len(self._memories))
        for table, blocks in zip(slot.tables, row.blocks, strict=False):
            table += blocks
        for memory, table in zip(self._memories, slot.tables, strict=True):
            assert end <= len(table) * self.model.block_size, "the table is too short"
            seen = table[_first_seen(memory.group, row.start) // self.model.block_size :]
            assert len(set(seen)) == len(seen), "a block stands twice in what a row reads"
            memory.check(table, slot.digests, row.start, row.start)

    def _write(self, rows: list[Row]) -> None:
        for index, memory in enumerate(self._memories):
            written: set[int] = set()
            for row in rows:
                slot = self._slots[row.slot]
                cells = memory.write(slot.tables[index], slot.digests, row.start, row.start + row.count)
                assert not cells & written, "two rows write one place"
                written |= cells

    def _sample(self, row: Row) -> int:
        slot, end = self._slots[row.slot], row.start + row.count
        assert end == len(slot.tokens), "a row samples in the middle of its tokens"
        for memory, table in zip(self._memories, slot.tables, strict=True):
            memory.check(table, slot.digests, row.start, end)
        token = next_token(slot.tokens, slot.prompt_len, slot.params, slot.seed, self.model)
        slot.tokens.append(token)
        slot.digest()
        return token


# A block in use: its group and id, the slot's filling, and its place in that one's table.
_Use = tuple[int, int | None, int, int]


class FenceWatch:
    """Sees plans as they leave, and that none writes what a plan still out may read or write."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._fillings = 0
        self._slots: dict[int, tuple[int, list[list[int | None]]]] = {}
        self._out: list[tuple[set[int], dict[tuple[int, int | None], set[_Use]]]] = []

    def leaves(self, plan: StepPlan) -> None:
        """A plan is sent."""
        for fill in plan.fills:
            assert not any(fill.slot in slots for slots, _ in self._out), (
                f"slot {fill.slot} is filled while a plan that uses it is out"
            )
            self._fillings += 1
            self._slots[fill.slot] = (self._fillings, tables(fill))
        touched: dict[tuple[int, int | None], set[_Use]] = {}
        for row in plan.rows:
            for table, blocks in zip(self._slots[row.slot][1], row.blocks, strict=False):
                table += blocks
            for use in self._uses(row, row.start):
                # One sequence may go on writing the block that it has begun.
                for _, others in self._out:
                    assert others.get(use[:2], set()) <= {use}, "a block that a plan still touches is written"
            for use in self._uses(row, None):
                touched.setdefault(use[:2], set()).add(use)
        self._out.append(({row.slot for row in plan.rows}, touched))

    def returns(self) -> None:
        """The oldest plan is back."""
        self._out.pop(0)

    def _uses(self, row: Row, first: int | None) -> set[_Use]:
        """What the row touches from position `first` on; None: from the first it reads."""
        size, (filling, tables) = self._model.block_size, self._slots[row.slot]
        uses = set()
        for index, (group, table) in enumerate(zip(self._model.groups, tables, strict=True)):
            begin = _first_seen(group, row.start) if first is None else first
            for place in range(begin // size, (row.start + row.count - 1) // size + 1):
                uses.add((index, table[place], filling, place))
        return uses
