"""Plans that are out, and what may not be reused before they are back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from engine_core.errors import ResultMismatch, StaleResult
from engine_core.kv_group import Holding
from engine_core.sequence import Sequence
from engine_core.wire.executor import Row, SlotFill, StepResult


class Draft:
    """A plan in the making.

    Args:
        step: its number.
        budget: tokens it may hold.
    """

    __slots__ = ("budget", "fills", "rows", "step")

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.fills: list[SlotFill] = []
        self.rows: list[tuple[Sequence, Row]] = []

    def add(self, seq: Sequence, count: int, blocks: list[list[int]]) -> None:
        """A row of `count` tokens."""
        start = seq.computed
        sample = seq.launch(count, self.step)
        assert seq.slot is not None
        self.rows.append((seq, Row(seq.slot, start, count, blocks, sample)))
        self.budget -= count


class Flight(Struct, frozen=True):
    """A plan that is out: each row beside its sequence, and how many tokens it will bring."""

    step: int
    rows: list[tuple[Sequence, Row]]
    samples: int


class Flights:
    """The plans of one executor incarnation that are out, oldest first.

    Args:
        epoch: of the incarnation.
        vocab_size: sampled tokens stay below.
    """

    def __init__(self, epoch: int, vocab_size: int) -> None:
        self.epoch: Final = epoch
        self._vocab_size = vocab_size
        self._out: deque[Flight] = deque()
        self._steps = 0

    def __len__(self) -> int:
        return len(self._out)

    def next_step(self) -> int:
        """The number of the next plan, from 1."""
        return self._steps + 1

    def launch(self, rows: list[tuple[Sequence, Row]]) -> None:
        """The next plan leaves."""
        self._steps += 1
        self._out.append(Flight(step=self._steps, rows=rows, samples=sum(row.sample for _, row in rows)))

    def land(self, result: StepResult) -> Flight:
        """The plan that the result belongs to; it is out no more.

        Raises:
            StaleResult: another epoch, or not the oldest plan's step.
            ResultMismatch: not one token for each row that samples, or a token out of range.
        """
        if result.epoch != self.epoch:
            raise StaleResult("epoch", self.epoch, result.epoch)
        expected = self._out[0].step if self._out else None
        if result.step != expected:
            raise StaleResult("step", expected, result.step)
        self._check(self._out[0], result)
        return self._out.popleft()

    def oldest(self) -> list[Sequence]:
        """The sequences of the oldest plan out."""
        return [seq for seq, _ in self._out[0].rows] if self._out else []

    def violations(self, live: Iterable[Sequence]) -> list[str]:
        """Whether each sequence knows how many plans, and how many tokens to come, are out for it."""
        rows: Counter[int] = Counter()
        samples: Counter[int] = Counter()
        for flight in self._out:
            for seq, row in flight.rows:
                rows[id(seq)] += 1
                samples[id(seq)] += row.sample
        return [
            f"request {seq.key[1]}: {seq.in_flight} plans and {seq.assumed} tokens in flight by its own count, "
            f"{rows[id(seq)]} and {samples[id(seq)]} are out"
            for seq in live
            if (seq.in_flight, seq.assumed) != (rows[id(seq)], samples[id(seq)])
        ]

    def _check(self, flight: Flight, result: StepResult) -> None:
        if len(result.token_ids) != flight.samples:
            raise ResultMismatch(flight.step, "token_ids", flight.samples, len(result.token_ids))
        if result.logprobs is not None and len(result.logprobs) != flight.samples:
            raise ResultMismatch(flight.step, "logprobs", flight.samples, len(result.logprobs))
        if result.token_ids and not (min(result.token_ids) >= 0 and max(result.token_ids) < self._vocab_size):
            worst = next(token for token in result.token_ids if not 0 <= token < self._vocab_size)
            raise ResultMismatch(flight.step, "token_ids", self._vocab_size, worst)


class Held(Struct, frozen=True):
    """Blocks and slot of a sequence that runs no more; gain: by KV group the blocks that become available with them."""

    blocks: list[Holding]
    slot: int
    gain: tuple[int, ...]


class Fence:
    """Keeps blocks and slots until the last step that uses them has come back.

    Args:
        groups: how many KV groups there are.

    Attributes:
        gain: by KV group the blocks that will become available, at least.
    """

    def __init__(self, groups: int) -> None:
        self._held: dict[int, list[Held]] = {}
        self.gain = [0] * groups

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def hold(self, step: int, held: Held) -> None:
        """Keep it until `step` has come back."""
        self._held.setdefault(step, []).append(held)
        for group, blocks in enumerate(held.gain):
            self.gain[group] += blocks

    def lift(self, step: int) -> list[Held]:
        """What nothing uses any more, now that `step` has come back."""
        lifted = self._held.pop(step, [])
        for held in lifted:
            for group, blocks in enumerate(held.gain):
                self.gain[group] -= blocks
        return lifted

    def __iter__(self) -> Iterator[Held]:
        return (held for group in self._held.values() for held in group)
