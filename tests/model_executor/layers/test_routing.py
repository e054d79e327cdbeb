"""The choice of experts: by hand, and what holds of every choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from model_executor.layers.routing import Router, choose
from model_executor.models.spec import RoutingSpec
from tests.model_executor.engine import CPU

PLAIN = RoutingSpec(num_experts=4, top_k=2, score="softmax", normalize=False)


def test_softmax_by_hand() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 4.0]]).log()
    routing = choose(logits, PLAIN)
    assert routing.experts.tolist() == [[3, 1]]
    assert routing.weights[0].tolist() == pytest.approx([0.4, 0.3])
    normalized = choose(logits, structs.replace(PLAIN, normalize=True, scale=7.0))
    assert normalized.weights[0].tolist() == pytest.approx([4.0, 3.0])


def test_the_correction_ranks_and_does_not_weigh() -> None:
    spec = structs.replace(PLAIN, score="sigmoid", correction=True)
    logits = torch.zeros(1, 4)
    routing = choose(logits, spec, torch.tensor([0.0, 2.0, -1.0, 1.0]))
    assert routing.experts.tolist() == [[1, 3]]
    assert routing.weights[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("by", "expected"), [("best", [1, 0]), ("best_two", [2, 3])])
def test_groups_by_hand(by: str, expected: list[int]) -> None:
    """Group 0 holds the best expert, group 1 the best pair."""
    spec = structs.replace(PLAIN, score="sigmoid", groups=2, top_groups=1, group_score=by)
    assert choose(torch.tensor([[-3.0, 2.0, 1.0, 0.9]]), spec).experts.tolist() == [expected]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([(8, 1, 1), (8, 4, 2), (12, 3, 2), (6, 2, 2), (16, 8, 3)]),
    st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from(["best", "best_two"]),
    st.booleans(),
    st.sampled_from([0.1, 5.0, 200.0]),
    st.integers(0, 10**6),
)
def test_what_holds_of_every_choice(
    tokens: int,
    sizes: tuple[int, int, int],
    score: str,
    by: str,
    normalize: bool,
    spread: float,
    seed: int,
) -> None:
    experts, groups, top_groups = sizes
    top_k = min(4, top_groups * experts // groups)
    spec = RoutingSpec(experts, top_k, score, normalize, 2.5, groups, top_groups, by, correction=True)  # type: ignore[arg-type]  # drawn from the literals
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((tokens, experts), generator=generator) * spread
    routing = choose(logits, spec, torch.randn(experts, generator=generator))
    assert routing.experts.shape == routing.weights.shape == (tokens, top_k)
    assert bool(routing.weights.isfinite().all())
    assert bool((routing.weights >= 0).all())
    assert int(routing.experts.min()) >= 0
    assert int(torch.bincount(routing.experts.flatten(), minlength=experts).sum()) == tokens * top_k
    for row in routing.experts.tolist():
        assert len(set(row)) == top_k
        assert len({expert * groups // experts for expert in row}) <= top_groups
    if normalize and spread < 100:
        assert torch.allclose(routing.weights.sum(1), torch.full((tokens,), 2.5), rtol=1e-5)


def test_sigmoids_that_underflow_weigh_nothing() -> None:
    routing = choose(torch.full((1, 4), -200.0), structs.replace(PLAIN, score="sigmoid", normalize=True))
    assert routing.weights.tolist() == [[0.0, 0.0]]


def test_a_wide_router_computes_in_float32() -> None:
    """Two scores that bfloat16 cannot tell apart."""
    spec = structs.replace(PLAIN, wide=True, num_experts=2, top_k=1)
    router = Router(spec, 2, torch.bfloat16, CPU)
    router.scores.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 2.0**-10]]))
    hidden = torch.ones(1, 2, dtype=torch.bfloat16)
    assert router(hidden).experts.tolist() == [[1]]
    assert router(hidden).weights.dtype == torch.float32
