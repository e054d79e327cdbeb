"""The mixture of experts against a loop over tokens and experts."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.nn import functional

from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.layers.experts import ExpertLoop, ExpertsProblem, ExpertWeights
from model_executor.layers.moe import MoeMlp
from model_executor.models.spec import MlpSpec, MoeSpec, RoutingSpec
from tests.model_executor.engine import BLOCK_SIZE, CPU

HIDDEN: Final = 16
ROUTING = RoutingSpec(num_experts=6, top_k=3, score="softmax", normalize=True)
SPEC = MlpSpec(8, "silu", kind="moe", moe=MoeSpec(ROUTING))


def make(spec: MlpSpec, dtype: torch.dtype = torch.float32) -> MoeMlp:
    """A layer with random weights."""
    layer = MoeMlp(spec, HIDDEN, Chooser(KernelTable(), dtype, CPU, BLOCK_SIZE))
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return layer


def tokens(count: int) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(1))


def dense(layer: MoeMlp, hidden: Tensor) -> Tensor:
    """Each token and each of its experts by itself."""
    routing = layer.router(hidden)
    out = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        for expert, weight in zip(routing.experts[token].tolist(), routing.weights[token], strict=True):
            gate, up = (hidden[token] @ layer.experts.gate_up[expert]).chunk(2)
            out[token] += weight * ((functional.silu(gate) * up) @ layer.experts.down[expert])
    return out if layer.shared is None else out + layer.shared(hidden)


@pytest.mark.parametrize("shared", [0, 12])
@pytest.mark.parametrize("count", [1, 2, 17])
def test_equals_a_loop(shared: int, count: int) -> None:
    layer = make(structs.replace(SPEC, moe=MoeSpec(ROUTING, shared)))
    assert torch.allclose(layer(tokens(count)), dense(layer, tokens(count)), rtol=0, atol=1e-5)


def test_experts_that_nobody_chose_are_not_touched() -> None:
    layer = make(SPEC)
    hidden = tokens(1)
    chosen = layer.router(hidden).experts[0].tolist()
    for expert in set(range(6)) - set(chosen):
        layer.experts.gate_up[expert] = torch.nan
        layer.experts.down[expert] = torch.nan
    assert bool(layer(hidden).isfinite().all())
    layer.experts.down[chosen[0]] = torch.nan
    assert not bool(layer(hidden).isfinite().any())


def test_the_kernel_gets_each_token_once_for_each_of_its_experts() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Spy(ExpertLoop):
        def forward(self, tokens: Tensor, ends: Tensor, weights: ExpertWeights) -> Tensor:
            seen.append((tokens, ends))
            return super().forward(tokens, ends, weights)

    layer = make(SPEC)
    layer.experts.kernel = Spy(ExpertsProblem("cpu", torch.float32, 6, HIDDEN, 8, "silu"))
    hidden = tokens(11)
    layer(hidden)
    ((given, ends),) = seen
    assert given.shape == (11 * 3, HIDDEN)
    counts = torch.bincount(layer.router(hidden).experts.flatten(), minlength=6)
    assert ends.tolist() == counts.cumsum(0).tolist()
    assert sorted(map(tuple, given.tolist())) == sorted(tuple(row) for row in hidden.tolist() for _ in range(3))


def test_a_token_does_not_depend_on_the_others() -> None:
    """Padding rows take part in the sorting, so this is what keeps them out of the rows that count."""
    layer = make(SPEC)
    hidden = tokens(9)
    together = layer(hidden)
    for token in range(9):
        assert torch.allclose(layer(hidden[token : token + 1])[0], together[token], rtol=0, atol=1e-5)
    padded = torch.cat((hidden[:3], torch.zeros(5, HIDDEN)))
    assert torch.allclose(layer(padded)[:3], together[:3], rtol=0, atol=1e-5)


def test_output_has_the_dtype_of_the_input() -> None:
    layer = make(SPEC, torch.bfloat16)
    assert layer(tokens(4).bfloat16()).dtype == torch.bfloat16
