"""Where memory goes: how large the KV pools are.

Layers fall into KV groups by how long they need a token: for ever, or while it is in a window of so many tokens. Each
group has a pool of its own. The rule by which a budget of bytes is split:

1. All pools get equally many blocks, as if every layer kept every token, except that those with a window get no more
   than all sequences of a step can use at most, which is little.
2. Where there is a group without a window, the others get half of the bytes at most, and leave it one sequence of
   max_model_len: their pools bound how many sequences run, that of the other how long they are. It gets all that they
   leave.
3. What that group cannot use goes back to the others.

So the group without a window never gets less than if every layer kept every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_core.wire.config import CacheOptions
from engine_core.wire.executor import MOST_PLANS_OUT, KvGroup
from model_executor.errors import MemoryTooSmall

# Share of the memory that is free after the weights are loaded, for the KV cache, when no option tells.
DEFAULT_SHARE = {"cpu": 0.4, "cuda": 0.85}
# On CPU the cache shares the machine with others, and a full pool keeps what it once held: unless one sequence needs
# more, it stays small.
DEFAULT_CPU_BYTES = 512 * 2**20


@dataclass(frozen=True)
class GroupNeeds:
    """What a KV group costs.

    Attributes:
        window: tokens its layers see; None: all.
        block_bytes: of one block over its layers.
    """

    window: int | None
    block_bytes: int


@dataclass(frozen=True)
class PoolNeeds:
    """What bounds the KV pools.

    Attributes:
        groups: at least one; the one without a window, if there is one, comes first.
        block_size: tokens a block.
        max_model_len: tokens of the longest sequence.
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: tokens in one step.
    """

    groups: tuple[GroupNeeds, ...]
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def sequence_blocks(self, group: GroupNeeds) -> int:
        """Blocks of the group that the longest sequence cannot do without."""
        whole = -(-self.max_model_len // self.block_size)
        steady = KvGroup(group.window, 0).steady_blocks(self.block_size)
        return whole if steady is None else min(whole, steady)

    def most_blocks(self, group: GroupNeeds) -> int:
        """Blocks of the group that all sequences of a step can use at most."""
        most = self.sequence_blocks(group) * self.max_num_seqs
        if group.window is None:
            return most
        # What plans that are out compute is held beside the windows.
        chunks = -(-MOST_PLANS_OUT * self.max_num_batched_tokens // self.block_size)
        return min(most + chunks, -(-self.max_model_len // self.block_size) * self.max_num_seqs)

    def pool_bytes(self, blocks: Sequence[int]) -> int:
        """Bytes of pools of so many blocks, scratch blocks included."""
        return sum((count + 1) * group.block_bytes for count, group in zip(blocks, self.groups, strict=True))

    @property
    def enough_blocks(self) -> int:
        """The least num_kv_blocks that hold one sequence of max_model_len."""
        return max(map(self.sequence_blocks, self.groups))

    @property
    def enough_bytes(self) -> int:
        """Bytes of the pools that enough_blocks gives."""
        return self.pool_bytes(self.split_blocks(self.enough_blocks))

    def split_blocks(self, blocks: int) -> list[int]:
        """Pools of `blocks` blocks, less where a group with a window cannot use them."""
        return [blocks if group.window is None else min(blocks, self.most_blocks(group)) for group in self.groups]


def size_pools(
    options: CacheOptions, needs: PoolNeeds, device_type: str, free_bytes: Callable[[], int]
) -> list[KvGroup]:
    """How many blocks each KV pool gets, the scratch block not counted.

    `num_kv_blocks` decides (the most blocks of a pool; a group with a window gets what it can use of them), else
    `kv_cache_memory_bytes` (scratch blocks included), else a share of the free memory (DEFAULT_SHARE) up to what
    max_num_seqs sequences of max_model_len can use; on CPU up to DEFAULT_CPU_BYTES, or one sequence of max_model_len
    where that is more. There the pages of the pools are taken from the machine as they are first written.

    Args:
        options: of the cache.
        needs: what a block costs and what must fit.
        device_type: "cpu" or "cuda".
        free_bytes: free on the device now.

    Raises:
        MemoryTooSmall: the pools would not hold one sequence of max_model_len, or the blocks asked for are more
            than fit into the free memory.
    """
    free = free_bytes()
    if options.num_kv_blocks is not None:
        source = f"num_kv_blocks {options.num_kv_blocks}"
        pools = needs.split_blocks(options.num_kv_blocks)
        _check_fits(options, needs.pool_bytes(pools), needs, free)
    elif options.kv_cache_memory_bytes is not None:
        source = f"kv_cache_memory_bytes {options.kv_cache_memory_bytes}"
        _check_fits(options, options.kv_cache_memory_bytes, needs, free)
        pools = split_bytes(options.kv_cache_memory_bytes, needs)
    else:
        budget = int(free * DEFAULT_SHARE[device_type])
        if device_type == "cpu":
            budget = min(budget, max(DEFAULT_CPU_BYTES, needs.enough_bytes))
        budget = min(budget, needs.pool_bytes(list(map(needs.most_blocks, needs.groups))))
        source = f"{DEFAULT_SHARE[device_type]:.0%} of {free} free bytes"
        pools = split_bytes(budget, needs)
    for count, group in zip(pools, needs.groups, strict=True):
        if count < needs.sequence_blocks(group):
            raise _too_small(max(count, 0), group, needs, source)
    return [KvGroup(group.window, count) for count, group in zip(pools, needs.groups, strict=True)]


def split_bytes(budget: int, needs: PoolNeeds) -> list[int]:
    """Blocks of each pool for a budget of bytes, scratch blocks included; see the module for the rule."""
    left = budget - needs.pool_bytes([0] * len(needs.groups))
    pools = _level(left, needs.groups, needs)
    full, *sliding = needs.groups
    if full.window is not None or not sliding:
        return pools
    windows = pools[1:]
    share = min(left // 2, left - needs.sequence_blocks(full) * full.block_bytes)
    if _cost(windows, sliding) > share:
        windows = list(map(max, _level(share, sliding, needs), map(needs.sequence_blocks, sliding)))
    unused = left - _cost(windows, sliding) - needs.most_blocks(full) * full.block_bytes
    if unused > 0:
        windows = _level(_cost(windows, sliding) + unused, sliding, needs)
    return [(left - _cost(windows, sliding)) // full.block_bytes, *windows]


def _level(budget: int, groups: Sequence[GroupNeeds], needs: PoolNeeds) -> list[int]:
    """Equally many blocks for each, but with a window no more than it can use; the others share what it leaves."""
    # Without a window there is no limit: more blocks keep more prefixes.
    most = [budget if group.window is None else needs.most_blocks(group) for group in groups]
    pools = [0] * len(groups)
    left = sorted(range(len(groups)), key=most.__getitem__)
    while left:
        share = budget // sum(groups[index].block_bytes for index in left)
        index = left.pop(0)
        pools[index] = min(share, most[index])
        budget -= pools[index] * groups[index].block_bytes
    return pools


def _cost(pools: Sequence[int], groups: Sequence[GroupNeeds]) -> int:
    return sum(count * group.block_bytes for count, group in zip(pools, groups, strict=True))


def _check_fits(options: CacheOptions, wanted: int, needs: PoolNeeds, free: int) -> None:
    """Refuse pools that the free memory cannot hold, naming the option and what would fit."""
    if wanted <= free:
        return
    if options.num_kv_blocks is not None:
        fitting = max(_level(free - needs.pool_bytes([0] * len(needs.groups)), needs.groups, needs))
        field, given, limit = "num_kv_blocks", options.num_kv_blocks, max(fitting, 0)
    else:
        field, given, limit = "kv_cache_memory_bytes", options.kv_cache_memory_bytes or 0, free
    message = f"{field}: {given}: the KV cache takes {wanted} bytes and {free} are free; at most {limit} fits"
    raise MemoryTooSmall(field, given, limit, message)


def _too_small(blocks: int, group: GroupNeeds, needs: PoolNeeds, source: str) -> MemoryTooSmall:
    limit = blocks * needs.block_size
    layers = "" if group.window is None else f" of the layers with a window of {group.window}"
    message = (
        f"max_model_len: {needs.max_model_len}: one sequence takes {needs.sequence_blocks(group)} KV blocks of"
        f" {needs.block_size} tokens{layers}, and {source} gives {blocks};"
        f"{f' --max-model-len {limit} would fit, or' if limit else ' it takes'}"
        f" --num-kv-blocks {needs.enough_blocks}, or --kv-cache-memory-bytes {needs.enough_bytes}"
    )
    return MemoryTooSmall("max_model_len", needs.max_model_len, limit, message)
