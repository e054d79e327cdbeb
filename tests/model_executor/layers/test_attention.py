"""The attention part of a block against dense attention written out head by head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.batch import StepRows, build_index, to_inputs
from model_executor.kv_cache import KVCache, LayerShape
from model_executor.layers.attention import GroupedAttention
from model_executor.layers.rotary import Rotary
from model_executor.models.spec import AttentionSpec, NormSpec, RopeSpec
from tests.model_executor.engine import BLOCK_SIZE, CPU

TOKENS, HIDDEN = 11, 12


def dense(layer: GroupedAttention, hidden: Tensor, rotary: Rotary | None) -> Tensor:
    """softmax(q k^T * scale) v, one head and one query at a time."""
    spec = layer.spec
    heads = layer.qkv(hidden).view(TOKENS, -1, spec.head_dim)
    turned = spec.num_heads + spec.num_kv_heads
    if layer.qk_norm is not None:
        heads = torch.cat((layer.qk_norm(heads[:, :turned]), heads[:, turned:]), dim=1)
    if rotary is not None:
        rotated = rotary(torch.arange(TOKENS)).apply(heads[:, :turned])
        heads = torch.cat((rotated, heads[:, turned:]), dim=1)
    out = torch.zeros(TOKENS, spec.num_heads, spec.head_dim)
    for head in range(spec.num_heads):
        shared = spec.num_heads + head * spec.num_kv_heads // spec.num_heads
        for at in range(TOKENS):
            first = 0 if spec.window is None else max(0, at - spec.window + 1)
            keys, values = heads[first : at + 1, shared], heads[first : at + 1, shared + spec.num_kv_heads]
            scores = keys @ heads[at, head] * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            out[at, head] = scores.softmax(0) @ values
    projected: Tensor = layer.output(out.flatten(1))
    return projected


@pytest.mark.parametrize("rope", [None, RopeSpec("default", 100.0, 4, 64)], ids=["plain", "rotated"])
@pytest.mark.parametrize(
    ("kv_heads", "window", "bias", "soft_cap", "qk_norm"),
    [
        (4, None, False, None, None),
        (2, None, True, None, None),
        (1, 3, False, None, None),
        (2, 5, False, 2.0, None),
        (2, None, False, None, NormSpec(1e-6)),
        (1, 4, True, 3.0, NormSpec(1e-6, offset=True)),
    ],
)
def test_attention_equals_dense(
    rope: RopeSpec | None,
    kv_heads: int,
    window: int | None,
    bias: bool,
    soft_cap: float | None,
    qk_norm: NormSpec | None,
) -> None:
    spec = AttentionSpec(4, kv_heads, 4, 0.3, rope, window, soft_cap, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm)
    choose = Chooser(KernelTable(), torch.float32, CPU, BLOCK_SIZE)
    layer = GroupedAttention(spec, HIDDEN, choose)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    cache = KVCache.allocate([LayerShape(kv_heads, 4)], 3, BLOCK_SIZE, torch.float32, CPU)
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    one = torch.ones(1, dtype=torch.int64).numpy()
    rows = StepRows(slots=one * 0, starts=one * 0, counts=one * TOKENS, samples=one > 0)
    batch = to_inputs(build_index(rows, torch.tensor([[2, 0, 1]], dtype=torch.int32).numpy(), BLOCK_SIZE), ids)
    rotary = None if rope is None else Rotary(rope, 64, torch.float32, CPU)
    out = layer(hidden, None if rotary is None else rotary(batch.positions), cache.layers[0], batch)
    torch.testing.assert_close(out, dense(layer, hidden, rotary), rtol=0, atol=1e-4)
