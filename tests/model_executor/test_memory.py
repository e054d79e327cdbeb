from __future__ import annotations

import pytest

from engine_core.wire.config import CacheOptions
from model_executor.errors import MemoryTooSmall
from model_executor.memory import DEFAULT_CPU_BYTES, PoolNeeds, size_pool

NEEDS = PoolNeeds(block_bytes=1000, block_size=16, max_model_len=100, max_num_seqs=4)


def size(options: CacheOptions, free: int = 10**9, needs: PoolNeeds = NEEDS, device: str = "cpu") -> int:
    return size_pool(options, needs, device, lambda: free)


def test_needs() -> None:
    assert NEEDS.sequence_blocks == 7
    assert NEEDS.most_blocks == 28


def test_blocks_decide_over_bytes() -> None:
    assert size(CacheOptions(num_kv_blocks=9, kv_cache_memory_bytes=100_000)) == 9


def test_bytes_hold_the_scratch_block_too() -> None:
    assert size(CacheOptions(kv_cache_memory_bytes=100_999)) == 99


@pytest.mark.parametrize(("device", "share"), [("cpu", 0.4), ("cuda", 0.85)])
def test_default_is_a_share_of_what_is_free(device: str, share: float) -> None:
    assert size(CacheOptions(), free=25_000, device=device) == int(25 * share) - 1


def test_default_is_no_more_than_can_be_used() -> None:
    assert size(CacheOptions()) == 28


def test_default_on_cpu_stays_small_unless_one_sequence_needs_more() -> None:
    block = DEFAULT_CPU_BYTES // 8
    assert size(CacheOptions(), needs=PoolNeeds(block, 16, 96, 4), free=100 * block) == 7
    assert size(CacheOptions(), needs=PoolNeeds(block, 16, 320, 4), free=100 * block) == 20
    assert size(CacheOptions(), needs=PoolNeeds(block, 16, 320, 4), free=100 * block, device="cuda") == 80


def test_one_sequence_must_fit_and_the_error_tells_what_would() -> None:
    with pytest.raises(MemoryTooSmall) as caught:
        size(CacheOptions(num_kv_blocks=6))
    text = str(caught.value)
    assert (caught.value.field, caught.value.given, caught.value.limit) == ("max_model_len", 100, 96)
    for part in ("max_model_len: 100", "num_kv_blocks 6", "--max-model-len 96", "--num-kv-blocks 7"):
        assert part in text
    assert size(CacheOptions(num_kv_blocks=7)) == 7
    assert size(CacheOptions(num_kv_blocks=6), needs=PoolNeeds(1000, 16, 96, 4)) == 6


def test_the_bytes_that_the_error_names_are_enough() -> None:
    with pytest.raises(MemoryTooSmall, match="--kv-cache-memory-bytes 8000"):
        size(CacheOptions(kv_cache_memory_bytes=7999))
    assert size(CacheOptions(kv_cache_memory_bytes=8000)) == 7


def test_default_on_a_small_machine() -> None:
    with pytest.raises(MemoryTooSmall, match="40% of 5000 free bytes gives 1; --max-model-len 16 would fit"):
        size(CacheOptions(), free=5000)


def test_more_than_is_free_is_refused_with_what_fits() -> None:
    with pytest.raises(MemoryTooSmall) as caught:
        size(CacheOptions(num_kv_blocks=50), free=30_500)
    assert (caught.value.field, caught.value.given, caught.value.limit) == ("num_kv_blocks", 50, 29)
    assert size(CacheOptions(num_kv_blocks=29), free=30_500) == 29
    with pytest.raises(MemoryTooSmall) as caught:
        size(CacheOptions(kv_cache_memory_bytes=60_000), free=30_500)
    assert (caught.value.field, caught.value.limit) == ("kv_cache_memory_bytes", 30_500)
    assert size(CacheOptions(kv_cache_memory_bytes=30_500), free=30_500) == 29
