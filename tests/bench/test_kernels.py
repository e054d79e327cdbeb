"""Kernel cases: what they count is what they do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.ceilings import Ceilings, best
from bench.kernels import (
    CASES,
    TOKEN_CASES,
    KernelCase,
    Shape,
    batch_of,
    decode_attention,
    measure_case,
    products,
    roofline_s,
)
from model_executor.attention.spec import AttentionProblem
from model_executor.attention.torch_ref import SPEC as REFERENCE
from model_executor.kv_cache import LayerCache
from model_executor.native.library import Native, load_native

SMALL = Shape(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=64, context=40)
CEILINGS = Ceilings(bytes_per_s=1e9, operations_per_s={"float32": 1e10, "int8": 1e11}, threads=1)


@pytest.fixture(scope="module")
def native() -> Native:
    return load_native(1)


@pytest.mark.parametrize("make", [*CASES, *TOKEN_CASES])
@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_every_case_runs(native: Native, make: object, rows: int) -> None:
    assert callable(make)
    for case in make(native, SMALL, rows):
        first = case.run().clone()
        # Calls that follow each other work on different data.
        assert not torch.equal(first, case.run())
        assert min(case.bytes, case.operations) > 0
        assert case.name.split()[0].endswith(native.name), case.name


@torch.inference_mode()
def test_cases_without_the_library_are_torch_s() -> None:
    shape = dataclasses.replace(SMALL, layers=1)
    names = [case.name.split()[0] for make in CASES if make is not products for case in make(None, shape, 2)]
    assert names == ["torch_norm", "torch_sdpa", "torch_sdpa"]


@torch.inference_mode()
def test_a_product_counts_the_weight_as_it_is_kept(native: Native) -> None:
    cases = {case.name.partition(" ")[2]: case for case in products(native, SMALL, 3)}
    assert cases["down, 3 rows"].bytes == 2 * 128 * 64 + 4 * 3 * (128 + 64)
    assert cases["down in int8, 3 rows"].bytes < cases["down, 3 rows"].bytes
    assert cases["gate and up, 3 rows"].bytes == 2 * 64 * 256 + 4 * 3 * (64 + 128)
    assert cases["gate and up, 3 rows"].operations == 2 * 3 * 64 * 256
    assert (cases["down, 3 rows"].numbers, cases["down in int8, 3 rows"].numbers) == ("float32", "int8")


def test_attention_counts_the_cache_that_it_reads(native: Native) -> None:
    (case,) = decode_attention(native, SMALL, 3)
    cache = 3 * 40 * 2 * 2 * 16 * 4
    assert case.bytes == cache + 2 * 3 * 4 * 16 * 4
    # A product and a sum for each element of key and value, for each query head.
    assert case.operations == 2 * 2 * 3 * 40 * 4 * 16


@pytest.mark.parametrize("queries", [1, 40, 7])
def test_the_batch_is_what_kernels_expect(queries: int) -> None:
    problem = AttentionProblem("cpu", torch.float32, 4, 2, 16, 16, 0.25)
    batch = batch_of(2, queries, 40)
    size = (7, 16, 2, 16)
    cache = LayerCache(torch.randn(size), torch.randn(size))
    query = torch.randn(2 * queries, 4, 16)
    made = REFERENCE.factory(problem).forward(query, cache, batch)
    for row in range(2):
        key, value = (one[batch.block_tables[row]].flatten(0, 1)[:40] for one in (cache.key, cache.value))
        places = slice(row * queries, (row + 1) * queries)
        scores = torch.einsum("qhd,khd->hqk", query[places], key.repeat_interleave(2, 1)) * 0.25
        mask = torch.arange(40)[None] > torch.arange(40 - queries, 40)[:, None]
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        wanted = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, 1))
        torch.testing.assert_close(made[places], wanted)


def test_the_roofline_is_the_lower_of_both_ceilings() -> None:
    moving = KernelCase("m", 1000, 10, "float32", lambda: None)
    counting = KernelCase("c", 10, 1000, "float32", lambda: None)
    assert (roofline_s(moving, CEILINGS), roofline_s(counting, CEILINGS)) == (1e-6, 1e-7)
    assert [measure_case(one, 1, CEILINGS)["bound"] for one in (moving, counting)] == ["memory", "arithmetic"]


def test_figures_belong_together() -> None:
    found = measure_case(KernelCase("m", 4000, 10, "float32", lambda: None), 2, CEILINGS)
    assert found["fraction"] == pytest.approx(4.0 / found["us"])
    assert found["gb_per_s"] == pytest.approx(4000 / found["us"] / 1000)


def test_the_best_of_several_calls_counts_and_the_first_does_not() -> None:
    calls: list[int] = []
    assert best(lambda: calls.append(1), repeats=3) >= 0
    assert len(calls) == 4
