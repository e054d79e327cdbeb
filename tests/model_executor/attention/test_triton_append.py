"""Triton append in the interpreter against the indexed copy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from model_executor.attention import triton_append
from model_executor.attention.spec import AttentionProblem
from model_executor.attention.torch_ref import IndexCopyAppend
from model_executor.attention.triton_append import TritonAppend
from model_executor.kv_cache import LayerCache
from tests.model_executor import interpreted  # noqa: F401 - before the kernels are made

BLOCKS, SIZE = 5, 16


def problem(kv_heads: int, head_dim: int, dtype: torch.dtype) -> AttentionProblem:
    return AttentionProblem("cpu", dtype, kv_heads, kv_heads, head_dim, SIZE, 1.0)


def filled(kv_heads: int, head_dim: int, dtype: torch.dtype) -> LayerCache:
    generator = torch.Generator().manual_seed(0)
    shape = (BLOCKS, SIZE, kv_heads, head_dim)
    return LayerCache(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)))


def drawn(tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as slices of one projection."""
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn((tokens, 3 * kv_heads, head_dim), generator=generator).to(dtype)
    return heads[:, kv_heads : 2 * kv_heads], heads[:, 2 * kv_heads :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 16), (3, 80), (8, 128), (20, 128)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_equals_the_indexed_copy(dtype: torch.dtype, kv_heads: int, head_dim: int, tokens: int) -> None:
    key, value = drawn(tokens, kv_heads, head_dim, dtype)
    slots = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(2))[:tokens]
    ours, theirs = filled(kv_heads, head_dim, dtype), filled(kv_heads, head_dim, dtype)
    TritonAppend(problem(kv_heads, head_dim, dtype)).forward(key, value, ours, slots)
    IndexCopyAppend(problem(kv_heads, head_dim, dtype)).forward(key, value, theirs, slots)
    assert torch.equal(ours.key, theirs.key)
    assert torch.equal(ours.value, theirs.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_is_replaced(dtype: torch.dtype) -> None:
    key, value = drawn(4, 2, 16, dtype)
    for row, number in enumerate((float("nan"), float("inf"), float("-inf"))):
        key[row, 0, 3] = value[row, 1, 5] = number
    ours, theirs = filled(2, 16, dtype), filled(2, 16, dtype)
    slots = torch.tensor([3, 20, 70, 79])
    TritonAppend(problem(2, 16, dtype)).forward(key, value, ours, slots)
    IndexCopyAppend(problem(2, 16, dtype)).forward(key, value, theirs, slots)
    assert ours.key.isfinite().all()
    assert torch.equal(ours.key, theirs.key)
    assert torch.equal(ours.value, theirs.value)


def test_negative_slots_are_skipped() -> None:
    key, value = drawn(3, 2, 16, torch.float32)
    cache, before = filled(2, 16, torch.float32), filled(2, 16, torch.float32)
    TritonAppend(problem(2, 16, torch.float32)).forward(key, value, cache, torch.tensor([-1, 5, -1]))
    assert torch.equal(cache.slots()[0][5], key[1])
    cache.slots()[0][5] = before.slots()[0][5]
    cache.slots()[1][5] = before.slots()[1][5]
    assert torch.equal(cache.key, before.key)
    assert torch.equal(cache.value, before.value)


def test_no_tokens_is_no_launch() -> None:
    cache, before = filled(2, 16, torch.float32), filled(2, 16, torch.float32)
    empty = torch.empty(0, 2, 16)
    TritonAppend(problem(2, 16, torch.float32)).forward(empty, empty, cache, torch.empty(0, dtype=torch.int64))
    assert torch.equal(cache.key, before.key)


def test_limits_are_told() -> None:
    here = problem(2, 16, torch.float32)
    assert triton_append.SPEC.reject(here) == ("device cpu: runs on cuda",)
    assert triton_append.SPEC.reject(dataclasses.replace(here, device="cuda")) == ()
