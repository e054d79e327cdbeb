from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs

from model_executor.huge_pages import HUGE_PAGE
from model_executor.kv_cache import KVCache, LayerShape, group_layers
from model_executor.models.spec import AttentionSpec, LatentSpec, NormSpec

CPU = torch.device("cpu")


def test_shapes_differ_by_layer() -> None:
    cache = KVCache.allocate([LayerShape(2, 8), LayerShape(4, 16)], 10, 4, torch.float32, CPU)
    assert cache[0].key.shape == (11, 4, 2, 8)
    assert cache[1].value.shape == (11, 4, 4, 16)
    assert (cache.num_blocks, cache.scratch_block, cache.block_size) == (10, 10, 4)
    assert cache.nbytes == 11 * 4 * (2 * 8 + 4 * 16) * 2 * 4


def test_bytes_of_a_token() -> None:
    assert LayerShape(3, 64).token_bytes(torch.bfloat16) == 2 * 3 * 64 * 2
    assert LayerShape(1, 20, 0).token_bytes(torch.bfloat16) == 20 * 2
    assert LayerShape(1, 20, 4).token_bytes(torch.bfloat16) == 24 * 2


def test_a_layer_of_latents_keeps_them_and_nothing_else() -> None:
    latent = LatentSpec(
        kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8, query_rank=None, norm=NormSpec(1e-6), interleaved=True
    )
    grouped = AttentionSpec(4, 2, 12, 1.0, None)
    shapes = [LayerShape.of(grouped), LayerShape.of(structs.replace(grouped, kind="mla", latent=latent))]
    cache = KVCache.allocate(shapes, 3, 4, torch.float32, CPU)
    assert cache[0].key.shape == cache[0].value.shape == (4, 4, 2, 12)
    assert cache[1].key.shape == (4, 4, 1, 20)
    assert cache[1].value.numel() == 0
    assert cache.nbytes == 4 * 4 * 4 * (2 * 2 * 12 + 20)
    assert [shape.token_bytes(torch.float32) for shape in shapes] == [4 * 48, 4 * 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_starts_as_zeros_and_can_be_written(dtype: torch.dtype) -> None:
    cache = KVCache.allocate([LayerShape(1, 4)], 3, 2, dtype, CPU)
    assert not bool(cache[0].key.any())
    keys, values = cache[0].slots()
    keys[5] = 2.0
    assert cache[0].key[2, 1].tolist() == [[2.0] * 4]
    assert not bool(values.any())


def test_memory_is_not_touched_before_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    cache = KVCache.allocate([LayerShape(8, 128)], 2**15, 16, torch.float32, CPU)
    assert cache.nbytes > 2**32
    assert resident() - before < 2**26


def test_layers_that_need_tokens_equally_long_share_a_group() -> None:
    assert group_layers([8, None, 8, 4, None], 100) == ((None, 4, 8), (2, 0, 2, 1, 0))
    assert group_layers([8, 8], 100) == ((8,), (0, 0))
    assert group_layers([None, 100, 99], 100) == ((None, 99), (0, 0, 1)), "no sequence outgrows a window of 100"


def test_each_group_has_its_own_pool() -> None:
    cache = KVCache.allocate_groups([LayerShape(2, 8)] * 3, (9, 4), (0, 1, 0), 4, torch.float32, CPU)
    assert [layer.key.shape[0] for layer in cache.layers] == [10, 5, 10]
    assert (cache.pools, cache.group_of, cache.num_blocks, cache.scratch_block) == ((9, 4), (0, 1, 0), 9, 9)
    assert cache.nbytes == (10 + 5 + 10) * 4 * 2 * 8 * 2 * 4


def test_layers_do_not_touch_their_next_huge_pages_in_the_same_step() -> None:
    shapes = [LayerShape(3, 64)] * 8
    cache = KVCache.allocate(shapes, 400, 16, torch.float32, CPU)
    begins = {one.data_ptr() % HUGE_PAGE for layer in cache.layers for one in (layer.key, layer.value)}
    assert len(begins) == 16
