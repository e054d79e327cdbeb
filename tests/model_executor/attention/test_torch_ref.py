from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_executor.attention.torch_ref import IndexCopyAppend, TorchReference, visible
from model_executor.kv_cache import KVCache, LayerShape
from tests.model_executor.paged import CPU, dense, make_case, make_problem

ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7)), min_size=1, max_size=5)


def test_by_hand() -> None:
    """One head of width 1, scale 1: keys 0 and ln 3, values 4 and 8, query 1: weights 1/4 and 3/4, so 7."""
    problem = make_problem(heads=1, kv_heads=1, head_dim=1)
    case = make_case(problem, [(1, 1)], seed=0)
    key, value = torch.tensor([[[0.0]], [[math.log(3.0)]]]), torch.tensor([[[4.0]], [[8.0]]])
    slots = case.batch.block_tables[0, 0] * problem.block_size + torch.arange(2)
    IndexCopyAppend(problem).forward(key, value, case.cache[0], slots)
    output = TorchReference(problem).forward(torch.ones(1, 1, 1), case.cache[0], case.batch)
    assert output.item() == pytest.approx(7.0)


def test_visible_by_hand() -> None:
    assert visible(1, 2, 3, None, CPU).tolist() == [[True, True, False], [True, True, True]]
    assert visible(1, 2, 3, 2, CPU).tolist() == [[True, True, False], [False, True, True]]
    assert visible(2, 1, 3, 1, CPU).tolist() == [[False, False, True]]


@settings(max_examples=60, deadline=None)
@given(
    ROWS,
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    st.sampled_from([1, 3, 4, 16]),
    st.none() | st.integers(1, 12),
    st.none() | st.just(2.5),
    st.integers(0, 10**6),
)
def test_against_dense_attention(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    seed: int,
) -> None:
    problem = make_problem(*heads, block_size=block_size, window=window, soft_cap=soft_cap)
    case = make_case(problem, rows, seed)
    output = TorchReference(problem).forward(case.query, case.cache[0], case.batch)
    assert torch.allclose(output.double(), dense(case), rtol=0, atol=2e-6)


def test_append_writes_where_it_is_told_and_nowhere_else() -> None:
    problem = make_problem()
    cache = KVCache.allocate([LayerShape(2, 8)], 5, 4, torch.float32, CPU)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([17, 0, 9])
    IndexCopyAppend(problem).forward(key, value, cache[0], slots)
    for written, tensor in ((key, cache[0].key), (value, cache[0].value)):
        flat = tensor.view(-1, 2, 8)
        assert torch.equal(flat[slots], written)
        rest = torch.ones(24, dtype=torch.bool)
        rest[slots] = False
        assert not bool(flat[rest].any())


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_append_keeps_the_cache_finite(dtype: torch.dtype, kept: torch.dtype) -> None:
    problem = make_problem(kv_heads=1, head_dim=4, dtype=dtype)
    cache = KVCache.allocate([LayerShape(1, 4)], 2, 4, kept, CPU)
    broken = torch.tensor([[[math.nan, math.inf, -math.inf, 1.5]]], dtype=dtype)
    IndexCopyAppend(problem).forward(broken, broken, cache[0], torch.tensor([5]))
    largest = min(float(torch.tensor(torch.finfo(dtype).max, dtype=dtype).to(kept)), torch.finfo(kept).max)
    for tensor in (cache[0].key, cache[0].value):
        assert tensor[1, 1, 0].tolist() == [0.0, largest, -largest, 1.5]
