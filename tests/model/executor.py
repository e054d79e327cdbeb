"""An executor in plain Python that notices every corruption: its KV memory holds (position, token) pairs.

The next token of a sequence is a hash of all its tokens, as they are read back from KV memory through the block table.
A wrong token, position, block, length or order therefore changes the stream or trips a check.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from zlib import crc32

from engine_core.wire.codec import unpack_ids
from engine_core.wire.executor import Row, SlotFill, StepPlan, StepResult
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
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass
class _Slot:
    tokens: array[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    table: list[int] = field(default_factory=list)


class FakeExecutor:
    """Runs plans one after the other. Rows of one plan run at the same time: all read before any writes."""

    def __init__(self, model: Model, epoch: int) -> None:
        self.model = model
        self.epoch = epoch
        size = model.num_blocks * model.block_size
        self._kv_tokens = array("i", [POISON]) * size
        self._kv_positions = array("i", [POISON]) * size
        self._slots: dict[int, _Slot] = {}
        self._poisoned: frozenset[int] = frozenset()
        self._steps = 0

    def poison(self, free: frozenset[int]) -> None:
        """Destroy what newly freed blocks hold; to be called whenever the scheduler may have freed or taken some."""
        for block in free - self._poisoned:
            for cell in self._cells(block):
                self._kv_tokens[cell] = self._kv_positions[cell] = POISON
        self._poisoned = free

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one plan."""
        self._steps += 1
        assert (plan.epoch, plan.step) == (self.epoch, self._steps)
        assert sum(row.count for row in plan.rows) <= self.model.max_num_batched_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows) <= self.model.max_num_seqs
        for fill in plan.fills:
            self._fill(fill)
        for row in plan.rows:
            self._slots[row.slot].table += row.blocks
            self._read(row)
        written: set[int] = set()
        for row in plan.rows:
            written |= self._write(row, written)
        sampled = [self._sample(row) for row in plan.rows if row.sample]
        return StepResult(plan.epoch, plan.step, sampled, None, 0, 1)

    def _fill(self, fill: SlotFill) -> None:
        assert 0 <= fill.slot < self.model.max_num_seqs
        tokens = unpack_ids(fill.token_ids)
        self._slots[fill.slot] = _Slot(tokens, fill.prompt_len, fill.params, fill.seed, list(fill.blocks))

    def _cells(self, block: int) -> range:
        size = self.model.block_size
        return range(block * size, (block + 1) * size)

    def _gather(self, slot: _Slot, kv: array[int], end: int) -> array[int]:
        size = self.model.block_size
        found = array("i")
        for block in slot.table[: -(-end // size)]:
            found += kv[block * size : (block + 1) * size]
        return found[:end]

    def _read(self, row: Row) -> None:
        slot = self._slots[row.slot]
        assert row.count >= 1
        assert row.start + row.count <= len(slot.table) * self.model.block_size, "the table is too short"
        assert len(set(slot.table)) == len(slot.table), "a block stands twice in a table"
        assert row.start + row.count <= len(slot.tokens), "a token is computed before it is known"
        positions = self._gather(slot, self._kv_positions, row.start)
        assert positions.tolist() == list(range(row.start)), "the cache holds other positions"
        assert self._gather(slot, self._kv_tokens, row.start) == slot.tokens[: row.start], (
            "the cache holds other tokens"
        )

    def _write(self, row: Row, taken: set[int]) -> set[int]:
        slot, size = self._slots[row.slot], self.model.block_size
        cells: set[int] = set()
        for position in range(row.start, row.start + row.count):
            cell = slot.table[position // size] * size + position % size
            assert cell not in taken, "two rows write one place"
            self._kv_tokens[cell] = slot.tokens[position]
            self._kv_positions[cell] = position
            cells.add(cell)
        return cells

    def _sample(self, row: Row) -> int:
        slot, end = self._slots[row.slot], row.start + row.count
        assert end == len(slot.tokens), "a row samples in the middle of its tokens"
        context = self._gather(slot, self._kv_tokens, end)
        token = next_token(context, slot.prompt_len, slot.params, slot.seed, self.model)
        slot.tokens.append(token)
        return token


class FenceWatch:
    """Sees plans as they leave, and that none reuses what a plan still out may touch."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[int, list[int]] = {}
        self._out: list[list[tuple[int, list[int]]]] = []

    def leaves(self, plan: StepPlan) -> None:
        """A plan is sent."""
        busy = {slot for held in self._out for slot, _ in held}
        for fill in plan.fills:
            assert fill.slot not in busy, f"slot {fill.slot} is filled while a plan that uses it is out"
            self._tables[fill.slot] = list(fill.blocks)
        held = [(row.slot, self._tables[row.slot]) for row in plan.rows]
        for row in plan.rows:
            table = self._tables[row.slot]
            table += row.blocks
            written = table[row.start // self._block_size : (row.start + row.count - 1) // self._block_size + 1]
            for others in self._out:
                for _, other in others:
                    # Tables are compared by identity: one sequence may go on writing its own blocks.
                    assert other is table or not set(written) & set(other), "a block that a plan still reads is written"
        self._out.append(held)

    def returns(self) -> None:
        """The oldest plan is back."""
        self._out.pop(0)
