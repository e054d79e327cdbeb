"""Native attention and heads against the step-by-step forms in torch, and to the bit against themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model_executor.attention.spec import AttentionProblem
from model_executor.attention.torch_ref import IndexCopyAppend, TorchReference
from model_executor.batch import BatchInputs, StepRows, build_index, to_inputs
from model_executor.kv_cache import LayerCache
from model_executor.layers.heads import HeadsProblem
from model_executor.layers.norm import QueryKeyNorm
from model_executor.layers.rotary import Rotation
from model_executor.models.spec import AttentionSpec, NormSpec
from model_executor.native.attention import fused_heads, paged_attention
from model_executor.native.library import Native
from tests.model_executor.native.builds import each_build

pytestmark = pytest.mark.parametrize("native", each_build())

# Tokens in the cache before the step and tokens of the step, by row: on both sides of the borders of tiles (32) and of
# parts (1024), decode and prefill rows mixed.
ROWS = [(0, 1), (31, 1), (32, 1), (1023, 1), (1500, 1), (2100, 1), (0, 70), (33, 17), (1010, 40)]
BLOCKS = 420
PROBLEMS = [
    AttentionProblem("cpu", torch.float32, 9, 3, 64, 16, 0.125),
    AttentionProblem("cpu", torch.float32, 4, 4, 32, 16, 0.2),
    AttentionProblem("cpu", torch.float32, 8, 2, 128, 32, 0.1, window=40),
    AttentionProblem("cpu", torch.float32, 4, 1, 256, 16, 0.06, window=1100, soft_cap=20.0),
    AttentionProblem("cpu", torch.float32, 6, 2, 80, 16, 0.1, soft_cap=5.0),
    AttentionProblem("cpu", torch.float32, 9, 3, 64, 16, 0.125, cache_dtype=torch.float16),
    AttentionProblem("cpu", torch.float32, 8, 2, 80, 32, 0.1, window=40, cache_dtype=torch.bfloat16),
]


def make_cache(problem: AttentionProblem) -> LayerCache:
    generator = torch.Generator().manual_seed(1)
    shape = (BLOCKS + 1, problem.block_size, problem.num_kv_heads, problem.head_dim)
    key, value = (torch.randn(shape, generator=generator).to(problem.kept_in) for _ in range(2))
    return LayerCache(key, value)


def as_native(cache: LayerCache) -> LayerCache:
    """The same keys as native kernels keep them."""
    return LayerCache(cache.key.permute(0, 2, 3, 1).contiguous().view(cache.key.shape), cache.value)


def make_batch(rows: list[tuple[int, int]], places: list[int], block_size: int) -> BatchInputs:
    """Rows whose blocks lie at random; the row at place p always has the same."""
    shuffled = np.random.default_rng(3).permutation(BLOCKS)
    width = BLOCKS // len(ROWS)
    width = max(width, 140 if block_size == 16 else 70)
    table = np.stack([np.resize(np.roll(shuffled, -40 * place), width) for place in places]).astype(np.int32)
    starts, counts = (np.array(column) for column in zip(*rows, strict=True))
    step = StepRows(np.arange(len(rows)), starts, counts, np.ones(len(rows), dtype=np.bool_))
    return to_inputs(build_index(step, table, block_size), torch.zeros(int(counts.sum()), dtype=torch.int64))


def queries(problem: AttentionProblem, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, problem.num_heads, problem.head_dim, generator=generator)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_equals_the_reference(native: Native, problem: AttentionProblem) -> None:
    cache = make_cache(problem)
    batch = make_batch(ROWS, list(range(len(ROWS))), problem.block_size)
    query = queries(problem, batch.num_tokens)
    kernel = paged_attention(native).factory(problem)
    # In float64: on several threads torch's float32 now and then differs from itself by more than the tolerance.
    expected = TorchReference(problem, torch.float64).forward(query, cache, batch)
    torch.testing.assert_close(kernel.forward(query, as_native(cache), batch), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_token_is_the_same_bits_however_its_prompt_is_cut(native: Native, problem: AttentionProblem) -> None:
    cache = make_cache(problem)
    kernel = paged_attention(native).factory(problem)
    for place, (start, count) in enumerate(ROWS):
        query = queries(problem, count)
        whole = kernel.forward(query, cache, make_batch([(start, count)], [place], problem.block_size))
        for size in (1, 13):
            parts = [
                kernel.forward(
                    query[first : first + size],
                    cache,
                    make_batch([(start + first, min(size, count - first))], [place], problem.block_size),
                )
                for first in range(0, count, size)
            ]
            assert torch.equal(torch.cat(parts), whole)


def test_a_row_is_the_same_bits_in_every_batch(native: Native) -> None:
    problem = PROBLEMS[0]
    cache = make_cache(problem)
    kernel = paged_attention(native).factory(problem)
    rows = [row for row in ROWS if row[1] == 1]
    order = sorted(range(len(rows)), key=lambda place: -sum(rows[place]))
    query = queries(problem, len(rows))
    together = kernel.forward(query, cache, make_batch(rows, list(range(len(rows))), problem.block_size))
    for token, place in enumerate(order):
        alone = kernel.forward(query[token : token + 1], cache, make_batch([rows[place]], [place], problem.block_size))
        assert torch.equal(alone[0], together[token])


def test_queries_inside_a_projection(native: Native) -> None:
    problem = PROBLEMS[0]
    cache = make_cache(problem)
    kernel = paged_attention(native).factory(problem)
    batch = make_batch(ROWS, list(range(len(ROWS))), problem.block_size)
    wide = torch.cat((queries(problem, batch.num_tokens), torch.ones(batch.num_tokens, 6, 64)), dim=1)
    assert torch.equal(
        kernel.forward(wide[:, :9], cache, batch), kernel.forward(wide[:, :9].contiguous(), cache, batch)
    )


def test_too_many_heads_for_an_item_are_refused(native: Native) -> None:
    problem = HeadsProblem("cpu", torch.float32, 49, 1, 64, 16, None, qk_norm=False)
    spec = fused_heads(native)
    assert spec.reject(problem) == ("49 heads a KV head: takes up to 48",)
    assert spec.reject(replace(problem, num_heads=4, head_dim=40)) == ("head_dim 40: no multiple of 16",)
    assert spec.reject(replace(problem, num_heads=4, block_size=8)) == ("block_size 8: no multiple of 16",)
    assert spec.reject(replace(problem, num_heads=4)) == ()
    assert paged_attention(native).reject(PROBLEMS[0]) == ("keys plain: takes turned",)


@pytest.mark.parametrize("turned", [0, 16, 40, 64])
@pytest.mark.parametrize("norm", [None, NormSpec(1e-5), NormSpec(1e-6, offset=True)], ids=str)
def test_heads_equal_norm_rotation_and_append(native: Native, turned: int, norm: NormSpec | None) -> None:
    heads, kv_heads, size, tokens = 5, 2, 64, 43
    generator = torch.Generator().manual_seed(4)
    problem = HeadsProblem(
        "cpu", torch.float32, heads, kv_heads, size, 16, "default" if turned else None, norm is not None
    )
    layer = None
    if norm is not None:
        spec = AttentionSpec(heads, kv_heads, size, 1.0, None)
        layer = QueryKeyNorm(spec, norm, torch.float32, torch.device("cpu"))
        layer.weight.copy_(torch.randn(2 * size, generator=generator))
    batch = make_batch([(3, tokens)], [0], 16)
    angles = torch.randn(200, turned // 2, generator=generator)
    rotation = Rotation(angles.cos(), angles.sin(), batch.positions) if turned else None
    projected = torch.randn(tokens, (heads + 2 * kv_heads) * size, generator=generator)
    projected[5, heads * size + 3] = float("nan")
    projected[6, -1], projected[7, -2] = float("inf"), float("-inf")
    shape = (BLOCKS + 1, 16, kv_heads, size)
    cache, expected = (LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(2))
    split = projected.clone().view(tokens, -1, size)
    both, value = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
    both = both if layer is None else layer(both)
    both = both if rotation is None else rotation.apply(both)
    append = IndexCopyAppend(AttentionProblem("cpu", torch.float32, heads, kv_heads, size, 16, 1.0))
    append.forward(both[:, heads:], value, expected, batch.slot_mapping)
    kernel = fused_heads(native).factory(problem)
    assert kernel is not None
    query = kernel.forward(projected, rotation, layer, cache, batch)
    torch.testing.assert_close(query, both[:, :heads], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache.key, as_native(expected).key, rtol=1e-5, atol=1e-6)
    assert torch.equal(cache.value, expected.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_cache_holds_the_nearest_number(native: Native, dtype: torch.dtype) -> None:
    """Ties go to even, subnormal numbers are kept, and what is beyond the largest number becomes that."""
    size, tokens = 64, 300
    heads = 1
    patterns = torch.arange(tokens * size, dtype=torch.int32) * 223717 + 0x33000000
    numbers = patterns.view(torch.float32).clone()
    numbers[:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 65519.0])
    ties = torch.arange(1, 2 * size, 2, dtype=torch.float32) * 2.0**-25
    numbers[4 * size : 4 * size + size], numbers[5 * size : 6 * size] = ties, -ties
    kept = numbers.view(tokens, 1, size)
    projected = torch.cat((torch.zeros(tokens, size), kept.view(tokens, size), kept.view(tokens, size)), dim=1)
    shape = (BLOCKS + 1, 16, 1, size)
    cache, expected = (LayerCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(2))
    batch = make_batch([(0, tokens)], [0], 16)
    problem = AttentionProblem("cpu", torch.float32, heads, 1, size, 16, 1.0, cache_dtype=dtype)
    IndexCopyAppend(problem).forward(kept, kept, expected, batch.slot_mapping)
    kernel = fused_heads(native).factory(HeadsProblem("cpu", torch.float32, heads, 1, size, 16, None, qk_norm=False))
    assert kernel is not None
    kernel.forward(projected, None, None, cache, batch)
    assert bool(expected.value.isfinite().all())
    assert int((expected.value != 0).sum()) > tokens * size // 2
    assert torch.equal(cache.value, expected.value)
    assert torch.equal(cache.key, as_native(expected).key)
