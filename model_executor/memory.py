"""Where memory goes: how large the KV pool is, and the ledger of bytes by purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_core.wire.config import CacheOptions
from model_executor.errors import MemoryTooSmall

# Share of the memory that is free after the weights are loaded, for the KV cache, when no option tells.
DEFAULT_SHARE = {"cpu": 0.4, "cuda": 0.85}
# On CPU the cache shares the machine with others, and a full pool keeps what it once held: unless one sequence needs
# more, it stays small.
DEFAULT_CPU_BYTES = 512 * 2**20


@dataclass(frozen=True)
class PoolNeeds:
    """What bounds the KV pool.

    Attributes:
        block_bytes: of one block over all layers.
        block_size: tokens a block.
        max_model_len: tokens of the longest sequence.
        max_num_seqs: sequences in one step.
    """

    block_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int

    @property
    def sequence_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def most_blocks(self) -> int:
        """Blocks that all sequences of a step can use at most."""
        return self.sequence_blocks * self.max_num_seqs


def size_pool(options: CacheOptions, needs: PoolNeeds, device_type: str, free_bytes: Callable[[], int]) -> int:
    """How many blocks the KV pool gets, the scratch block not counted.

    `num_kv_blocks` decides, else `kv_cache_memory_bytes` (scratch block included), else a share of the free memory
    (DEFAULT_SHARE) up to what max_num_seqs sequences of max_model_len can use; on CPU up to DEFAULT_CPU_BYTES, or one
    sequence of max_model_len where that is more. There the pages of the pool are taken from the machine as they are
    first written.

    Args:
        options: of the cache.
        needs: what a block costs and what must fit.
        device_type: "cpu" or "cuda".
        free_bytes: free on the device now.

    Raises:
        MemoryTooSmall: the pool would not hold one sequence of max_model_len, or the blocks asked for are more
            than fit into the free memory.
    """
    free = free_bytes()
    if options.num_kv_blocks is not None:
        blocks, source = options.num_kv_blocks, f"num_kv_blocks {options.num_kv_blocks}"
        _check_fits(options, blocks, needs, free)
    elif options.kv_cache_memory_bytes is not None:
        blocks = options.kv_cache_memory_bytes // needs.block_bytes - 1
        source = f"kv_cache_memory_bytes {options.kv_cache_memory_bytes}"
        _check_fits(options, blocks, needs, free)
    else:
        budget = int(free * DEFAULT_SHARE[device_type])
        if device_type == "cpu":
            budget = min(budget, max(DEFAULT_CPU_BYTES, (needs.sequence_blocks + 1) * needs.block_bytes))
        blocks = min(budget // needs.block_bytes - 1, needs.most_blocks)
        source = f"{DEFAULT_SHARE[device_type]:.0%} of {free} free bytes"
    if blocks < needs.sequence_blocks:
        raise _too_small(max(blocks, 0), needs, source)
    return blocks


def _check_fits(options: CacheOptions, blocks: int, needs: PoolNeeds, free: int) -> None:
    """Refuse a pool that the free memory cannot hold, naming the option and what would fit."""
    wanted = (blocks + 1) * needs.block_bytes
    if wanted <= free:
        return
    fitting = max(free // needs.block_bytes - 1, 0)
    if options.num_kv_blocks is not None:
        field, given, limit = "num_kv_blocks", options.num_kv_blocks, fitting
    else:
        field, given, limit = "kv_cache_memory_bytes", options.kv_cache_memory_bytes or 0, free
    message = f"{field}: {given}: the KV cache takes {wanted} bytes and {free} are free; at most {limit} fits"
    raise MemoryTooSmall(field, given, limit, message)


def _too_small(blocks: int, needs: PoolNeeds, source: str) -> MemoryTooSmall:
    limit = blocks * needs.block_size
    bytes_needed = (needs.sequence_blocks + 1) * needs.block_bytes
    message = (
        f"max_model_len: {needs.max_model_len}: one sequence takes {needs.sequence_blocks} KV blocks of"
        f" {needs.block_size} tokens, and {source} gives {blocks}; --max-model-len {limit} would fit, or"
        f" --num-kv-blocks {needs.sequence_blocks}, or --kv-cache-memory-bytes {bytes_needed}"
    )
    return MemoryTooSmall("max_model_len", needs.max_model_len, limit, message)
