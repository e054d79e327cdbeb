"""The KV blocks of the device, by number: who may take which. Nothing here knows of tokens.

A block is in exactly one of three states:
    free    nobody holds it and its content means nothing
    cached  nobody holds it, its content can still be found by prefix; the least recently used is taken first
    owned   held by one or more sequences
free + cached + owned == total, always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct


class Ledger(Struct, frozen=True):
    """How many blocks are in which state."""

    free: int
    cached: int
    owned: int
    total: int


class BlockPool:
    """Reference-counted blocks 0 .. total - 1. Taking and giving back cost O(1) a block.

    Args:
        total: how many blocks there are.
        is_cached: whether a block's content can be found by prefix.
        forget: called with a cached block just before it is handed out for other content.
    """

    def __init__(self, total: int, is_cached: Callable[[int], bool], forget: Callable[[int], None]) -> None:
        self._references = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._is_cached = is_cached
        self._forget = forget

    @property
    def total(self) -> int:
        """Blocks there are."""
        return len(self._references)

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that nobody holds."""
        return len(self._free) + len(self._cached)

    def take(self, count: int) -> list[int]:
        """Own `count` blocks of no content; the caller has seen that they are available."""
        assert 0 <= count <= self.available, f"{count} blocks taken, {self.available} available"
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = self._cached.popitem(last=False)[0]
            self._forget(block)
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are cached or that others own."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, given in order of position.

        The last one becomes the first to be evicted: a prefix is worth more than what follows it.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            assert count >= 0, f"block {block} released by someone who does not hold it"
            self._references[block] = count
            if count == 0:
                if self._is_cached(block):
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(self._references[block] == 0 for block in blocks)

    def exclusive(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have a single holder: what that holder's leaving makes available."""
        return sum(self._references[block] == 1 for block in blocks)

    def free_blocks(self) -> frozenset[int]:
        """Blocks whose content means nothing."""
        return frozenset(self._free)

    def ledger(self) -> Ledger:
        """Counts by state; `owned` is counted, not derived."""
        owned = sum(count > 0 for count in self._references)
        return Ledger(free=len(self._free), cached=len(self._cached), owned=owned, total=self.total)

    def violations(self, holders: Iterable[Iterable[int]]) -> list[str]:
        """Which invariants do not hold, given the table of every holder."""
        found: list[str] = []
        ledger = self.ledger()
        if ledger.free + ledger.cached + ledger.owned != ledger.total:
            found.append(f"blocks: free + cached + owned != total: {ledger}")
        held = [0] * self.total
        for table in holders:
            for block in table:
                held[block] += 1
        for block, count in enumerate(self._references):
            if count != held[block]:
                found.append(f"block {block}: {count} references, {held[block]} holders")
        free = set(self._free)
        if len(free) != len(self._free) or free & self._cached.keys():
            found.append("blocks: a block is free twice, or free and cached")
        if any(self._references[block] for block in free | self._cached.keys()):
            found.append("blocks: a free or cached block is held")
        if any(not self._is_cached(block) for block in self._cached) or any(map(self._is_cached, free)):
            found.append("blocks: the pool and the prefix cache disagree on what is cached")
        return found
