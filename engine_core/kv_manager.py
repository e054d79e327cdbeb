"""KV blocks for sequences: the only place that joins tokens, block tables and the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from engine_core.block_pool import Ledger
from engine_core.kv_group import Holding, SlidingGroup, make_groups
from engine_core.prefix_cache import block_name, root_name
from engine_core.sequence import Sequence
from engine_core.wire.executor import KvGroup

_NO_BLOCKS: Final[list[list[int]]] = []
# Blocks by group.
Blocks = tuple[int, ...]


class KVManager:
    """Gives sequences their blocks and takes them back.

    Layers of a model fall into groups with a pool each (engine_core.kv_group). A sequence starts with blocks for all
    tokens it has, in a sliding group with what its window can need of them, and grows by one as it decodes. Blocks are
    shared only when full, and never written again: a sequence writes behind the tokens it found.

    Args:
        groups: of the device, at least one.
        block_size: tokens a block.
        most_tokens: of a step.
        prefix_caching: whether equal beginnings share blocks.
        whole: tokens that every sequence holds neighbouring blocks for from its start to its end; None: for its own.
            Needs full groups, and no prefix_caching. All takings are then alike, so that those given back are
            neighbours again.
    """

    def __init__(
        self,
        groups: Iterable[KvGroup],
        block_size: int,
        *,
        most_tokens: int,
        prefix_caching: bool,
        whole: int | None = None,
    ) -> None:
        self._block_size = block_size
        self._caching = prefix_caching
        self._whole = whole
        self._groups = make_groups(groups, block_size, most_tokens)
        self._sliding = [(index, group) for index, group in enumerate(self._groups) if isinstance(group, SlidingGroup)]
        self._leaving: dict[int, list[tuple[SlidingGroup, Holding, int]]] = {}

    @property
    def available(self) -> int:
        """Blocks that nobody holds, of all groups."""
        return sum(group.pool.available for group in self._groups)

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a prompt's chunk that blocks are sure to be there for; None: any number."""
        parts = [group.extra_most for _, group in self._sliding]
        return max(1, min(parts) * self._block_size // 2) if parts else None

    def has_spare(self, keep: int) -> bool:
        """Whether each group has a block beside `keep`; or one more whole sequence."""
        if self._whole is not None:
            keep = -(-self._whole // self._block_size) - 1
        return all(group.spare(keep) > 0 for group in self._groups)

    def admit(self, seq: Sequence, keep: int) -> tuple[Blocks, int]:
        """Give a sequence that holds nothing its blocks: those found by prefix, and new ones.

        Looking up and reserving are one act. A hit leaves at least one token to compute. A pinned sequence gets blocks
        for all tokens it may ever hold, so that it never needs another one, nor another one's.

        Args:
            keep: blocks that must stay available in each group after.

        Returns:
            (blocks that lack, tokens found); the former empty when the sequence has got its blocks. Otherwise nothing
            has changed.
        """
        assert not seq.held, "a sequence is admitted once"
        found, hits = self._find(seq)
        need = self._need(seq)
        lacking = self._lacking(hits, need, keep)
        if max(lacking) > 0:
            return lacking, 0
        seq.held = [group.admit(found, hit, need) for group, hit in zip(self._groups, hits, strict=True)]
        seq.committed = found
        return (), found * self._block_size

    def lacking(self, seq: Sequence, keep: int) -> Blocks:
        """What admit would say now; where it is 0 or less the group has enough."""
        return self._lacking(self._find(seq)[1], self._need(seq), keep)

    def room(self, seq: Sequence, tokens: int) -> int:
        """How many of the next `tokens` tokens may be computed in the next step; none while what the sequence leaves
        behind is still read by steps that are out. It lets go of what it leaves behind.
        """
        for index, group in self._sliding:
            holding = seq.held[index]
            if group.leave_behind(holding, seq.computed):
                if seq.in_flight:
                    self._leaving.setdefault(seq.last_step, []).append((group, holding, holding.live))
                else:
                    group.let_go(holding, holding.live)
            if len(holding.table) * self._block_size < seq.computed + tokens:
                tokens = min(tokens, group.most(holding) * self._block_size - seq.computed)
        return max(0, tokens)

    def grow(self, seq: Sequence, tokens: int) -> list[list[int]] | None:
        """Make the tables cover `tokens` tokens, within `room`: for each group the blocks appended, nothing at all
        when there are none; or None and no change when some group lacks them.
        """
        blocks = -(-tokens // self._block_size)
        for holding in seq.held:
            if len(holding.table) < blocks:
                break
        else:
            return _NO_BLOCKS
        if max(self.short(seq, tokens)) > 0:
            return None
        return [group.grow(holding, blocks) for group, holding in zip(self._groups, seq.held, strict=True)]

    def short(self, seq: Sequence, tokens: int) -> Blocks:
        """Blocks that lack for the tables to cover `tokens` tokens; where it is 0 or less the group has enough."""
        blocks = -(-tokens // self._block_size)
        return tuple(group.short(holding, blocks) for group, holding in zip(self._groups, seq.held, strict=True))

    def commit(self, seq: Sequence, computed: int) -> None:
        """The first `computed` tokens of the sequence are in its blocks for sure: full ones may be shared."""
        full = computed // self._block_size
        if full <= seq.committed or not self._caching:
            return
        self._extend_names(seq, full)
        for group, holding in zip(self._groups, seq.held, strict=True):
            group.settle(holding, seq.hashes, seq.committed, full)
        seq.committed = full

    def landed(self, step: int) -> None:
        """A step has come back: what only it could still read, and was left behind, is let go of."""
        for group, holding, upto in self._leaving.pop(step, ()):
            group.let_go(holding, upto)

    def detach(self, seq: Sequence) -> list[Holding]:
        """Take the blocks from the sequence; they stay owned until `free`."""
        held, seq.held = seq.held, []
        seq.committed = 0
        return held

    def free(self, held: list[Holding]) -> None:
        """Let go of what was detached."""
        for group, holding in zip(self._groups, held, strict=True):
            group.free(holding)

    def gain(self, held: list[Holding]) -> Blocks:
        """How many blocks become available when their holder lets go of them."""
        return tuple(group.gain(holding) for group, holding in zip(self._groups, held, strict=True))

    def ledger(self) -> Ledger:
        """Counts by state, over all groups."""
        ledgers = [group.pool.ledger() for group in self._groups]
        return Ledger(
            free=sum(ledger.free for ledger in ledgers),
            cached=sum(ledger.cached for ledger in ledgers),
            owned=sum(ledger.owned for ledger in ledgers),
            total=sum(ledger.total for ledger in ledgers),
        )

    def free_blocks(self) -> list[frozenset[int]]:
        """For each group the blocks whose content means nothing."""
        return [group.pool.free_blocks() for group in self._groups]

    def violations(self, live: Iterable[Sequence], detached: Iterable[list[Holding]]) -> list[str]:
        """Which invariants do not hold, given all live sequences and all that is detached and not yet free."""
        sequences, others = list(live), list(detached)
        found: list[str] = []
        for index, group in enumerate(self._groups):
            mine = [seq.held[index] for seq in sequences]
            found += group.violations(mine + [held[index] for held in others])
            for seq, holding in zip(sequences, mine, strict=True):
                table = holding.table
                if self._whole is not None and table != list(range(table[0], table[0] + self._need(seq))):
                    found.append(f"request {seq.key[1]}: its blocks are no {self._need(seq)} neighbours")
                for place in range(holding.freed, len(holding.table)):
                    block = holding.table[place]
                    name = group.cache.name_of(block)
                    if name is not None and (place >= seq.committed or name != seq.hashes[place]):
                        found.append(f"request {seq.key[1]}: block {place} ({block}) is cached for other tokens")
        return found

    def _lacking(self, hits: list[list[int]], need: int, keep: int) -> Blocks:
        if self._whole is not None:
            keep = 0  # nobody grows
        return tuple(group.lacking(hit, need, keep) for group, hit in zip(self._groups, hits, strict=True))

    def _need(self, seq: Sequence) -> int:
        tokens = self._whole or (seq.rules.max_total if seq.pinned else len(seq.tokens))
        return -(-tokens // self._block_size)

    def _find(self, seq: Sequence) -> tuple[int, list[list[int]]]:
        """The longest prefix in blocks that every group knows, and the blocks that each needs of it."""
        hits: list[list[int]] = [[] for _ in self._groups]
        if not self._caching:
            return 0, hits
        found = (len(seq.tokens) - 1) // self._block_size
        self._extend_names(seq, found)
        agreed = index = 0
        while agreed < len(self._groups):
            count, hits[index] = self._groups[index].find(seq.hashes, found)
            agreed = agreed + 1 if count == found else 1
            found = count
            index = (index + 1) % len(self._groups)
        return found, hits

    def _extend_names(self, seq: Sequence, full: int) -> None:
        """Names are made once for each full block: tokens never change."""
        size = self._block_size
        for index in range(len(seq.hashes), full):
            parent = seq.hashes[-1] if seq.hashes else root_name(seq.salt)
            seq.hashes.append(block_name(parent, seq.tokens[index * size : (index + 1) * size]))
