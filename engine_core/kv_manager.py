"""KV blocks for sequences: the only place that joins tokens, block tables and the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from engine_core.block_pool import BlockPool, Ledger
from engine_core.prefix_cache import PrefixCache, block_name, root_name
from engine_core.sequence import Sequence

_NO_BLOCKS: Final[list[int]] = []


class KVManager:
    """Gives sequences their blocks and takes them back.

    A sequence starts with blocks for all tokens it has, and grows by one as it decodes. Blocks are shared only when
    full, and never written again: a sequence writes behind the tokens it found.

    Args:
        num_blocks: blocks of the device.
        block_size: tokens a block.
        prefix_caching: whether equal beginnings share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self._block_size = block_size
        self._caching = prefix_caching
        self._cache = PrefixCache()
        self._pool = BlockPool(num_blocks, self._cache.__contains__, self._cache.forget)

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return self._pool.available

    def admit(self, seq: Sequence, keep: int) -> tuple[int, int]:
        """Give a sequence that holds nothing its blocks: those found by prefix, and new ones.

        Looking up and reserving are one act. A hit leaves at least one token to compute. A pinned sequence gets blocks
        for all tokens it may ever hold, so that it never needs another one, nor another one's.

        Args:
            keep: blocks that must stay available after.

        Returns:
            (blocks that lack, tokens found); the former 0 when the sequence has got its blocks. Otherwise nothing
            has changed.
        """
        assert not seq.table, "a sequence is admitted once"
        found = self._find(seq)
        new = self._need(seq) - len(found)
        lacking = new + self._pool.idle(found) + keep - self._pool.available
        if lacking > 0:
            return lacking, 0
        self._pool.share(found)
        seq.table = found + self._pool.take(new)
        seq.committed = len(found)
        return 0, len(found) * self._block_size

    def lacking(self, seq: Sequence, keep: int) -> int:
        """What admit would say now; 0 or less: it would get its blocks."""
        found = self._find(seq)
        return self._need(seq) - len(found) + self._pool.idle(found) + keep - self._pool.available

    def grow(self, seq: Sequence, tokens: int) -> list[int] | None:
        """Make the table cover `tokens` tokens: the blocks appended, or None and no change when they are not there."""
        missing = -(-tokens // self._block_size) - len(seq.table)
        if missing <= 0:
            return _NO_BLOCKS
        if missing > self._pool.available:
            return None
        blocks = self._pool.take(missing)
        seq.table += blocks
        return blocks

    def commit(self, seq: Sequence, computed: int) -> None:
        """The first `computed` tokens of the sequence are in its blocks for sure: full ones may be shared."""
        full = computed // self._block_size
        if full <= seq.committed or not self._caching:
            return
        self._extend_names(seq, full)
        for index in range(seq.committed, full):
            self._cache.add(seq.hashes[index], seq.table[index])
        seq.committed = full

    def detach(self, seq: Sequence) -> list[int]:
        """Take the table from the sequence; the blocks stay owned until `free`."""
        blocks, seq.table = seq.table, []
        seq.committed = 0
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Let go of a detached table."""
        self._pool.release(blocks)

    def gain(self, blocks: Iterable[int]) -> int:
        """How many blocks become available when a table's holder lets go of it."""
        return self._pool.exclusive(blocks)

    def ledger(self) -> Ledger:
        """Counts by state."""
        return self._pool.ledger()

    def free_blocks(self) -> frozenset[int]:
        """Blocks whose content means nothing."""
        return self._pool.free_blocks()

    def violations(self, live: Iterable[Sequence], detached: Iterable[list[int]]) -> list[str]:
        """Which invariants do not hold, given all live sequences and all tables that are not yet free."""
        sequences = list(live)
        found = self._pool.violations([*(seq.table for seq in sequences), *detached]) + self._cache.violations()
        for seq in sequences:
            for index, block in enumerate(seq.table):
                name = self._cache.name_of(block)
                if name is not None and (index >= seq.committed or name != seq.hashes[index]):
                    found.append(f"request {seq.key[1]}: block {index} ({block}) is cached for other tokens")
        return found

    def _need(self, seq: Sequence) -> int:
        tokens = seq.rules.max_total if seq.pinned else len(seq.tokens)
        return -(-tokens // self._block_size)

    def _find(self, seq: Sequence) -> list[int]:
        if not self._caching:
            return []
        limit = (len(seq.tokens) - 1) // self._block_size
        self._extend_names(seq, limit)
        return self._cache.find(seq.hashes, limit)

    def _extend_names(self, seq: Sequence, full: int) -> None:
        """Names are made once for each full block: tokens never change."""
        size = self._block_size
        for index in range(len(seq.hashes), full):
            parent = seq.hashes[-1] if seq.hashes else root_name(seq.salt)
            seq.hashes.append(block_name(parent, seq.tokens[index * size : (index + 1) * size]))
