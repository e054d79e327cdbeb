"""Both kernels of the experts against a loop over tokens, and how one of them is chosen."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from model_executor.attention.dispatch import KernelTable
from model_executor.errors import NoKernel
from model_executor.layers.experts import (
    GROUPED_SPEC,
    LOOP_SPEC,
    ExpertLoop,
    ExpertsProblem,
    ExpertWeights,
    GroupedProduct,
)
from model_executor.layers.operator import OperatorSpec

HIDDEN, WIDTH = 16, 8


def problem(device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = WIDTH) -> ExpertsProblem:
    return ExpertsProblem(device, dtype, 5, HIDDEN, width, "silu")


@pytest.mark.parametrize("kernel", [ExpertLoop, GroupedProduct])
@pytest.mark.parametrize("counts", [[3, 0, 4, 0, 1], [0, 0, 0, 0, 7], [1, 1, 1, 1, 1], [2, 5, 0, 0, 0]], ids=str)
def test_each_token_passes_its_own_expert(kernel: type[ExpertLoop | GroupedProduct], counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = ExpertWeights(
        torch.randn((5, HIDDEN, 2 * WIDTH), generator=generator), torch.randn((5, WIDTH, HIDDEN), generator=generator)
    )
    for expert, count in enumerate(counts):
        if not count:
            weights.gate_up[expert] = torch.nan
    tokens = torch.randn((sum(counts), HIDDEN), generator=generator)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    out = kernel(problem()).forward(tokens, ends, weights)
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for token, expert in enumerate(owners):
        gate, up = (tokens[token] @ weights.gate_up[expert]).chunk(2)
        expected = (functional.silu(gate) * up) @ weights.down[expert]
        assert torch.allclose(out[token], expected, rtol=1e-5, atol=1e-4)


def test_the_choice_is_explained() -> None:
    table = KernelTable()
    assert isinstance(table.experts(problem()), ExpertLoop)
    assert table.experts(problem()) is table.experts(problem())
    (choice,) = table.explain()
    assert (choice.operator, choice.chosen) == ("experts", "expert_loop")
    assert choice.problem == "cpu float32 5 experts of 16 to 8, silu"
    assert choice.candidates[0].name == "grouped_mm"
    assert choice.candidates[0].reasons[0] == "device cpu: runs on cuda"


def test_each_limit_is_named() -> None:
    assert GROUPED_SPEC.reject(problem("cuda", torch.float32)) == ("dtype torch.float32: takes torch.bfloat16",)
    odd = GROUPED_SPEC.reject(problem("cuda", torch.bfloat16, 12))
    assert odd == ("intermediate_size 12: no multiple of 8",)
    assert LOOP_SPEC.reject(problem("cuda", torch.bfloat16, 12)) == ()
    broken = OperatorSpec("broken", ExpertLoop, other=lambda _: "not here")
    with pytest.raises(NoKernel, match=r"experts of cpu .*broken: not here"):
        KernelTable(experts=(broken,)).experts(problem())
