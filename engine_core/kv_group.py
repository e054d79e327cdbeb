"""The KV blocks of one group of layers: what sequences hold of it, and how many they may still need.

A full group keeps every token: a sequence that is admitted has blocks for all its tokens at once.

A sliding group keeps what lies in its window. A sequence reserves, when it is admitted and as it grows, what it can
need to go on token by token for ever: blocks for its tokens or `steady_blocks`, whichever is less. It takes blocks as
its tokens are computed, and lets go of those that lie before the window of everything still to be computed. So the
pool has two parts:

    reserved  the sum of all reservations stays below it; growth, margins and preemption are reckoned in it alone
    extra     what rows of several tokens hold above their reservations; it bounds the chunks of prompts

Shared blocks count for each of their holders, since holders leave them behind at different times and each then needs
one of its own. Holders together therefore never need more than the pool has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from engine_core.block_pool import BlockPool
from engine_core.prefix_cache import PrefixCache
from engine_core.wire.executor import MOST_PLANS_OUT, KvGroup

NOT_HELD: Final = -1


class Holding:
    """What one sequence holds of one group.

    Attributes:
        table: block ids in order of position.
        live: place of the first block that is still needed; freed: of the first one that is held. Blocks between them
            wait until the last step that reads them has come back.
        reserved: blocks set aside, in a sliding group.
    """

    __slots__ = ("freed", "live", "reserved", "table")

    def __init__(self, table: list[int], freed: int = 0, reserved: int = 0) -> None:
        self.table = table
        self.live = freed
        self.freed = freed
        self.reserved = reserved

    @property
    def blocks(self) -> list[int]:
        """The blocks held, in order."""
        return self.table[self.freed :] if self.freed else self.table

    @property
    def extra(self) -> int:
        """Blocks held above the reservation."""
        return max(0, len(self.table) - self.freed - self.reserved)


class BlockGroup:
    """What both kinds have in common.

    Args:
        num_blocks: of the pool.
        block_size: tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size: Final = block_size
        self.cache: Final = PrefixCache()
        self.pool: Final = BlockPool(num_blocks, self.cache.__contains__, self.cache.forget)

    def settle(self, holding: Holding, names: Sequence[bytes], first: int, last: int) -> None:
        """Blocks first .. last - 1 hold the tokens of `names`: they may be shared."""
        for index in range(max(first, holding.freed), last):
            self.cache.add(names[index], holding.table[index])

    def violations(self, holdings: list[Holding]) -> list[str]:
        """Which invariants do not hold, given all holdings."""
        return self.pool.violations(holding.blocks for holding in holdings) + self.cache.violations()


class FullGroup(BlockGroup):
    """Layers that see every token.

    Args:
        num_blocks, block_size: as of BlockGroup.
    """

    def find(self, names: Sequence[bytes], limit: int) -> tuple[int, list[int]]:
        """The longest known prefix of at most `limit` blocks: its length, and those of its blocks that are needed."""
        hit = self.cache.find(names, limit)
        return len(hit), hit

    def lacking(self, hit: list[int], need: int, keep: int) -> int:
        """Blocks that lack for a sequence of `need` blocks that begins with a hit, if `keep` stay available after;
        0 or less: it fits.
        """
        return need - len(hit) + self.pool.idle(hit) + keep - self.pool.available

    def admit(self, found: int, hit: list[int], need: int) -> Holding:
        """Hold the blocks of a hit, and the others anew; nothing lacks."""
        self.pool.share(hit)
        return Holding(hit + self.pool.take(need - found))

    def short(self, holding: Holding, blocks: int) -> int:
        """Blocks that lack for a table of `blocks`; 0 or less: it can grow."""
        return blocks - len(holding.table) - self.pool.available

    def grow(self, holding: Holding, blocks: int) -> list[int]:
        """Make the table `blocks` long; the blocks appended."""
        taken = self.pool.take(max(0, blocks - len(holding.table)))
        holding.table += taken
        return taken

    def free(self, holding: Holding) -> None:
        """Let go of all."""
        self.pool.release(holding.table)

    def gain(self, holding: Holding) -> int:
        """Blocks that become available when all is let go of."""
        return self.pool.exclusive(holding.table)

    def spare(self, keep: int) -> int:
        """Blocks that are available beside `keep`."""
        return self.pool.available - keep


class SlidingGroup(BlockGroup):
    """Layers that see the last `window` tokens.

    Invariants: the sum of reservations is at most total - extra_most, that of holdings above them at most extra_most.

    Args:
        group: window and size of the pool.
        block_size: tokens a block.
        most_tokens: of a step.
    """

    def __init__(self, group: KvGroup, block_size: int, most_tokens: int) -> None:
        super().__init__(group.num_blocks, block_size)
        steady = group.steady_blocks(block_size)
        assert group.window is not None
        assert steady is not None
        self._window = group.window
        # In a pool too small for that, sequences end before they need more than they reserved.
        self._steady = steady
        self.extra_most = extra_blocks(group, block_size, most_tokens)
        self._reserved = 0
        self._extra = 0
        self._growing = 0

    def find(self, names: Sequence[bytes], limit: int) -> tuple[int, list[int]]:
        """As of FullGroup: what the window needs of a prefix must be known."""
        found = index = limit
        hit: list[int] = []
        while index > self._first_needed(found * self.block_size):
            index -= 1
            block = self.cache.block_of(names[index])
            if block is None:
                found, hit = index, []
            else:
                hit.append(block)
        return found, hit[::-1]

    def lacking(self, hit: list[int], need: int, keep: int) -> int:
        """As of FullGroup, of blocks to reserve; a row that has all it can ever need is not kept a block for."""
        del hit  # it counts like blocks of one's own
        return min(need, self._steady) + min(keep, self._growing) - self._unreserved

    def admit(self, found: int, hit: list[int], need: int) -> Holding:
        """Hold the blocks of a hit, and reserve the others, which `grow` takes; nothing lacks."""
        first = found - len(hit)
        self.pool.share(hit)
        holding = Holding([NOT_HELD] * first + hit, first)
        self._growing += 1
        self._reserve(holding, min(need, self._steady))
        return holding

    def short(self, holding: Holding, blocks: int) -> int:
        """As of FullGroup, of blocks to reserve."""
        return min(blocks, self._steady) - holding.reserved - self._unreserved

    def most(self, holding: Holding) -> int:
        """How long the table may become now."""
        free = self.extra_most - self._extra
        # Below the steady length the reservation grows with the table.
        return holding.freed + self._steady + holding.extra + free

    def grow(self, holding: Holding, blocks: int) -> list[int]:
        """Make the table `blocks` long, at most `most`; the blocks appended."""
        before = holding.extra
        wanted = min(blocks, self._steady)
        if wanted > holding.reserved:
            self._reserve(holding, wanted)
        taken = self.pool.take(max(0, blocks - len(holding.table)))
        holding.table += taken
        self._extra += holding.extra - before
        return taken

    def leave_behind(self, holding: Holding, computed: int) -> bool:
        """Whether blocks fall out of the window of all that is computed after `computed` tokens."""
        live = (computed - self._window + 1) // self.block_size
        if live <= holding.live:
            return False
        holding.live = live
        return True

    def let_go(self, holding: Holding, upto: int) -> None:
        """Free the blocks before place `upto`."""
        if upto <= holding.freed:
            return
        before = holding.extra
        self.pool.release(holding.table[holding.freed : upto])
        holding.freed = upto
        self._extra += holding.extra - before

    def free(self, holding: Holding) -> None:
        """Let go of all, the reservation too."""
        self.let_go(holding, len(holding.table))
        self._reserved -= holding.reserved
        self._growing -= holding.reserved < self._steady
        holding.reserved = 0

    def gain(self, holding: Holding) -> int:
        """Blocks that may be reserved anew when all is let go of."""
        return holding.reserved

    def spare(self, keep: int) -> int:
        """Blocks that may be reserved beside `keep`."""
        return self._unreserved - min(keep, self._growing)

    def violations(self, holdings: list[Holding]) -> list[str]:
        """As of BlockGroup."""
        found = super().violations(holdings)
        reserved = sum(holding.reserved for holding in holdings)
        extra = sum(holding.extra for holding in holdings)
        if (reserved, extra) != (self._reserved, self._extra):
            found.append(
                f"window {self._window}: {reserved} blocks reserved and {extra} held above,"
                f" {self._reserved} and {self._extra} by its own count"
            )
        if self._unreserved < 0 or self._extra > self.extra_most:
            found.append(f"window {self._window}: more blocks are promised than there are")
        if self._growing != sum(holding.reserved < self._steady for holding in holdings):
            found.append(f"window {self._window}: its count of growing sequences is wrong")
        if any(not holding.freed <= holding.live <= len(holding.table) for holding in holdings):
            found.append(f"window {self._window}: a sequence holds blocks it has let go of")
        return found

    def _first_needed(self, position: int) -> int:
        """The first block that the query at `position` sees."""
        return max(0, position - self._window + 1) // self.block_size

    @property
    def _unreserved(self) -> int:
        return self.pool.total - self.extra_most - self._reserved

    def _reserve(self, holding: Holding, blocks: int) -> None:
        self._reserved += blocks - holding.reserved
        holding.reserved = blocks
        self._growing -= blocks >= self._steady


Group = FullGroup | SlidingGroup


def extra_blocks(group: KvGroup, block_size: int, most_tokens: int) -> int:
    """The part of a sliding group's pool that is for rows of several tokens: all that plans out at once can hold, but
    at most half, and never what one sequence needs to go on.
    """
    steady = group.steady_blocks(block_size)
    assert steady is not None
    wanted = -(-MOST_PLANS_OUT * most_tokens // block_size)
    return max(0, min(wanted, group.num_blocks // 2, group.num_blocks - steady))


def make_groups(groups: Iterable[KvGroup], block_size: int, most_tokens: int) -> list[Group]:
    """The groups of an executor, empty."""
    return [
        FullGroup(group.num_blocks, block_size)
        if group.window is None
        else SlidingGroup(group, block_size, most_tokens)
        for group in groups
    ]
