from __future__ import annotations

import pytest

from engine_core.wire.config import CacheOptions
from engine_core.wire.executor import KvGroup
from model_executor.errors import MemoryTooSmall
from model_executor.memory import DEFAULT_CPU_BYTES, GroupNeeds, PoolNeeds, size_pools, split_bytes


def one_pool(block_bytes: int, max_model_len: int) -> PoolNeeds:
    return PoolNeeds((GroupNeeds(None, block_bytes),), 16, max_model_len, 4, 64)


NEEDS = one_pool(1000, 100)


def size(options: CacheOptions, free: int = 10**9, needs: PoolNeeds = NEEDS, device: str = "cpu") -> int:
    (group,) = size_pools(options, needs, device, lambda: free)
    return group.num_blocks


def test_needs() -> None:
    assert NEEDS.sequence_blocks(NEEDS.groups[0]) == 7
    assert NEEDS.most_blocks(NEEDS.groups[0]) == 28


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
    assert size(CacheOptions(), needs=one_pool(block, 96), free=100 * block) == 7
    assert size(CacheOptions(), needs=one_pool(block, 320), free=100 * block) == 20
    assert size(CacheOptions(), needs=one_pool(block, 320), free=100 * block, device="cuda") == 80


def test_one_sequence_must_fit_and_the_error_tells_what_would() -> None:
    with pytest.raises(MemoryTooSmall) as caught:
        size(CacheOptions(num_kv_blocks=6))
    text = str(caught.value)
    assert (caught.value.field, caught.value.given, caught.value.limit) == ("max_model_len", 100, 96)
    for part in ("max_model_len: 100", "num_kv_blocks 6", "--max-model-len 96", "--num-kv-blocks 7"):
        assert part in text
    assert size(CacheOptions(num_kv_blocks=7)) == 7
    assert size(CacheOptions(num_kv_blocks=6), needs=one_pool(1000, 96)) == 6


def test_the_bytes_that_the_error_names_are_enough() -> None:
    with pytest.raises(MemoryTooSmall, match="--kv-cache-memory-bytes 8000"):
        size(CacheOptions(kv_cache_memory_bytes=7999))
    assert size(CacheOptions(kv_cache_memory_bytes=8000)) == 7


def test_default_on_a_small_machine() -> None:
    with pytest.raises(MemoryTooSmall, match="40% of 5000 free bytes gives 1; --max-model-len 16 would fit"):
        size(CacheOptions(), free=5000)


def test_no_length_is_advised_where_none_fits() -> None:
    with pytest.raises(MemoryTooSmall, match="gives 0; it takes --num-kv-blocks") as caught:
        size(CacheOptions(kv_cache_memory_bytes=10))
    assert "--max-model-len" not in str(caught.value)


def test_more_than_is_free_is_refused_with_what_fits() -> None:
    with pytest.raises(MemoryTooSmall) as caught:
        size(CacheOptions(num_kv_blocks=50), free=30_500)
    assert (caught.value.field, caught.value.given, caught.value.limit) == ("num_kv_blocks", 50, 29)
    assert size(CacheOptions(num_kv_blocks=29), free=30_500) == 29
    with pytest.raises(MemoryTooSmall) as caught:
        size(CacheOptions(kv_cache_memory_bytes=60_000), free=30_500)
    assert (caught.value.field, caught.value.limit) == ("kv_cache_memory_bytes", 30_500)
    assert size(CacheOptions(kv_cache_memory_bytes=30_500), free=30_500) == 29


MIXED = PoolNeeds((GroupNeeds(None, 100), GroupNeeds(64, 500)), 16, 1600, 8, 64)


def test_needs_of_a_window() -> None:
    full, window = MIXED.groups
    assert (MIXED.sequence_blocks(full), MIXED.most_blocks(full)) == (100, 800)
    # Five blocks hold 65 tokens wherever they begin; two plans of 64 tokens take eight.
    assert KvGroup(64, 0).steady_blocks(16) == 5
    assert (MIXED.sequence_blocks(window), MIXED.most_blocks(window)) == (5, 8 * 5 + 8)
    assert MIXED.enough_blocks == 100
    assert MIXED.enough_bytes == 101 * 100 + 49 * 500


def test_a_window_gets_what_it_can_use_and_the_rest_is_for_whole_sequences() -> None:
    assert split_bytes(600 * 40 + 600, MIXED) == [120, 24], "half of the bytes at most"
    assert split_bytes(600 * 100 + 600, MIXED) == [360, 48], "more it cannot use"
    assert split_bytes(600 * 20 + 600, MIXED) == [95, 5], "and one sequence at least"
    assert split_bytes(100 * 2000 + 500 * 48 + 600, MIXED) == [2000, 48]


def test_what_whole_sequences_cannot_use_goes_to_the_window() -> None:
    needs = PoolNeeds((GroupNeeds(None, 100), GroupNeeds(64, 500)), 16, 160, 8, 64)
    assert needs.most_blocks(needs.groups[0]) == 80
    assert split_bytes(100 * 80 + 500 * 30 + 600, needs) == [80, 30]


def test_no_budget_leaves_whole_sequences_less_than_without_windows() -> None:
    for budget in range(15_000, 200_000, 1111):
        full, window = split_bytes(budget, MIXED)
        assert full >= (budget - 600) // 600
        assert (full + 1) * 100 + (window + 1) * 500 <= budget


def test_windows_alone_share_evenly_up_to_their_needs() -> None:
    needs = PoolNeeds((GroupNeeds(16, 100), GroupNeeds(64, 100)), 16, 1600, 8, 64)
    assert [needs.most_blocks(group) for group in needs.groups] == [24, 48]
    assert split_bytes(200 * 20 + 200, needs) == [20, 20]
    assert split_bytes(200 * 30 + 200, needs) == [24, 36]


def test_pools_of_a_mixed_model() -> None:
    def sized(options: CacheOptions, free: int = 10**9) -> list[KvGroup]:
        return size_pools(options, MIXED, "cpu", lambda: free)

    assert sized(CacheOptions(num_kv_blocks=200)) == [KvGroup(None, 200), KvGroup(64, 48)]
    assert sized(CacheOptions()) == [KvGroup(None, 800), KvGroup(64, 48)]
    assert sized(CacheOptions(kv_cache_memory_bytes=60_600)) == [KvGroup(None, 360), KvGroup(64, 48)]
    with pytest.raises(MemoryTooSmall, match=r"--num-kv-blocks 100, or --kv-cache-memory-bytes 34600"):
        sized(CacheOptions(num_kv_blocks=90))
    with pytest.raises(MemoryTooSmall, match="5 KV blocks of 16 tokens of the layers with a window of 64"):
        size_pools(
            CacheOptions(num_kv_blocks=4), PoolNeeds((GroupNeeds(64, 500),), 16, 1600, 8, 64), "cpu", lambda: 10**9
        )


def test_more_blocks_than_are_free_are_refused_for_all_pools() -> None:
    with pytest.raises(MemoryTooSmall) as caught:
        size_pools(CacheOptions(num_kv_blocks=300), MIXED, "cpu", lambda: 40_000)
    limit = caught.value.limit
    assert size_pools(CacheOptions(num_kv_blocks=limit), MIXED, "cpu", lambda: 40_000)[0].num_blocks == limit
