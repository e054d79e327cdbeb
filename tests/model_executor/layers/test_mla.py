"""What latent attention keeps in the cache, and what it does with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.batch import BatchInputs, StepRows, build_index, to_inputs
from model_executor.kv_cache import KVCache, LayerShape
from model_executor.layers.mla import LatentAttention
from model_executor.layers.rotary import Rotary
from model_executor.models.spec import AttentionSpec, LatentSpec, NormSpec, RopeSpec
from tests.model_executor.engine import BLOCK_SIZE, CPU

HIDDEN, TOKENS, HEADS, RANK, NOPE, ROPE, VALUE = 12, 7, 3, 8, 6, 4, 5


def make(query_rank: int | None, interleaved: bool, rope: bool) -> LatentAttention:
    """A layer with random weights."""
    latent = LatentSpec(RANK, NOPE, ROPE, VALUE, query_rank, NormSpec(1e-6), interleaved)
    rotation = RopeSpec("default", 10.0, ROPE, 32) if rope else None
    spec = AttentionSpec(HEADS, HEADS, NOPE + ROPE, 0.3, rotation, kind="mla", latent=latent)
    layer = LatentAttention(spec, HIDDEN, Chooser(KernelTable(), torch.float32, CPU, BLOCK_SIZE))
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return layer


def turned(pairs: Tensor, position: int, interleaved: bool) -> Tensor:
    """Rotate the pairs of one head as complex numbers; the result has the real parts first."""
    first, second = (pairs[0::2], pairs[1::2]) if interleaved else (pairs[: ROPE // 2], pairs[ROPE // 2 :])
    angles = position * 10.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    product = torch.complex(first, second) * torch.exp(1j * angles)
    return torch.cat((product.real, product.imag))


def one_row(count: int) -> BatchInputs:
    one = np.ones(1, dtype=np.int64)
    rows = StepRows(slots=one * 0, starts=one * 0, counts=one * count, samples=one > 0)
    table = np.array([[2, 0, 1]], dtype=np.int32)
    return to_inputs(build_index(rows, table, BLOCK_SIZE), torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize("query_rank", [None, 9])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rope", [True, False])
def test_keeps_the_normed_latent_and_the_rotated_key(query_rank: int | None, interleaved: bool, rope: bool) -> None:
    layer = make(query_rank, interleaved, rope)
    cache = KVCache.allocate([LayerShape.of(layer.spec)], 3, BLOCK_SIZE, torch.float32, CPU)
    batch = one_row(TOKENS)
    hidden = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(1))
    rotary = None if layer.spec.rope is None else Rotary(layer.spec.rope, 32, torch.float32, CPU)
    layer(hidden, None if rotary is None else rotary(batch.positions), cache[0], batch)
    kept = cache[0].key.view(-1, RANK + ROPE)[batch.slot_mapping]
    small, key = torch.split(hidden @ layer.down.weight, [RANK, ROPE], dim=1)
    assert torch.allclose(kept[:, :RANK], layer.norm(small), rtol=0, atol=1e-6)
    for position in range(TOKENS):
        expected = turned(key[position], position if rope else 0, interleaved)
        assert torch.allclose(kept[position, RANK:], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("query_rank", [None, 9])
def test_the_first_token_sees_its_own_value_only(query_rank: int | None) -> None:
    layer = make(query_rank, True, True)
    cache = KVCache.allocate([LayerShape.of(layer.spec)], 3, BLOCK_SIZE, torch.float32, CPU)
    batch = one_row(TOKENS)
    hidden = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(1))
    assert layer.spec.rope is not None
    out = layer(hidden, Rotary(layer.spec.rope, 32, torch.float32, CPU)(batch.positions), cache[0], batch)
    latent = layer.norm((hidden[0] @ layer.down.weight)[:RANK])
    value = (latent @ layer.up.weight).view(HEADS, -1)[:, NOPE:]
    assert torch.allclose(out[0], value.flatten() @ layer.output.weight, rtol=0, atol=1e-5)
