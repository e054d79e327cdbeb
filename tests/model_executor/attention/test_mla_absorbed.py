from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_executor.attention import mla_absorbed
from model_executor.attention.mla import MlaProblem, MlaReference
from model_executor.attention.mla_absorbed import MlaAbsorbed
from tests.model_executor.latents import LatentCase, make_latent_case, make_latent_problem

# Float32 sums of at most 130 terms of size 1, in another order; the absorbed form rounds other partial results.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
ROWS = st.lists(
    st.tuples(st.integers(0, 120), st.just(1)) | st.tuples(st.integers(0, 40), st.integers(1, 30)),
    min_size=1,
    max_size=8,
)


def difference(case: LatentCase) -> float:
    """Largest difference between the fast form and the oracle."""
    fast, oracle = (
        kernel(case.problem).forward(case.query, case.up, case.cache[0], case.batch)
        for kernel in (MlaAbsorbed, MlaReference)
    )
    assert fast.dtype == case.problem.dtype
    return float((fast.float() - oracle.float()).abs().max())


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from([1, 4, 5]), st.sampled_from([1, 4, 16]), st.integers(0, 10**6))
def test_equals_the_oracle(rows: list[tuple[int, int]], heads: int, block_size: int, seed: int) -> None:
    problem = make_latent_problem(heads, block_size=block_size)
    assert difference(make_latent_case(problem, rows, seed)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_equals_the_oracle_in_each_dtype(dtype: torch.dtype) -> None:
    problem = make_latent_problem(6, 32, 16, 8, 16, 16, dtype)
    rows = [(40, 1), (0, 60), (41, 1), (16, 16), (0, 1), (3, 5)]
    assert difference(make_latent_case(problem, rows, seed=1, poison=200.0)) < TOLERANCE[dtype]


def test_both_forms_and_slices_of_heads_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row on either side of the border between the forms, and keys made for one head at a time."""
    problem = make_latent_problem(heads=5)
    kernel = MlaAbsorbed(problem)
    border = next(count for count in range(1, 200) if not kernel.absorbs(count))
    assert border > 1
    for count in (border - 1, border, border + 1):
        assert difference(make_latent_case(problem, [(17, count)], seed=count)) < TOLERANCE[torch.float32]
    case = make_latent_case(problem, [(17, border)], seed=9)
    whole = kernel.forward(case.query, case.up, case.cache[0], case.batch)
    for limit in (1, 2 * (17 + border) * 15 * 4):
        monkeypatch.setattr(mla_absorbed, "EXPANDED_BYTES", limit)
        sliced = kernel.forward(case.query, case.up, case.cache[0], case.batch)
        assert torch.allclose(sliced, whole, rtol=0, atol=1e-6)


def test_absorbs_rows_of_few_tokens_only() -> None:
    """The shape of DeepSeek V3: one token costs 1,088 against 131,392 multiplications, 170 tokens break even."""
    kernel = MlaAbsorbed(MlaProblem("cpu", torch.float32, 128, 512, 128, 64, 128, 64, 1.0))
    assert kernel.absorbs(1)
    assert kernel.absorbs(170)
    assert not kernel.absorbs(171)


def test_what_lies_beyond_a_context_has_no_weight() -> None:
    """Bits are equal whatever the free places of the cache hold, so nothing of an earlier owner gets through."""
    problem = make_latent_problem()
    rows = [(29, 1), (17, 1), (2, 30), (0, 3), (5, 1)]
    outputs = []
    for poison in (0.0, 3e4):
        case = make_latent_case(problem, rows, seed=2, poison=poison)
        outputs.append(MlaAbsorbed(problem).forward(case.query, case.up, case.cache[0], case.batch))
    assert torch.equal(*outputs)
