from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_executor.attention.torch_sdpa import TorchSdpa
from tests.model_executor.against_oracle import ROWS, TOLERANCE, difference
from tests.model_executor.paged import make_case, make_problem


@settings(max_examples=120, deadline=None)
@given(
    ROWS,
    st.sampled_from([(1, 1), (4, 4), (4, 2), (9, 3), (3, 1)]),
    st.sampled_from([1, 4, 16]),
    st.none() | st.integers(1, 130),
    st.integers(0, 10**6),
)
def test_equals_the_oracle(
    rows: list[tuple[int, int]], heads: tuple[int, int], block_size: int, window: int | None, seed: int
) -> None:
    problem = make_problem(*heads, block_size=block_size, window=window)
    assert difference(TorchSdpa, make_case(problem, rows, seed)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_equals_the_oracle_in_each_dtype(dtype: torch.dtype, head_dim: int) -> None:
    problem = make_problem(6, 2, head_dim, 16, dtype)
    rows = [(40, 1), (0, 33), (41, 1), (16, 16), (0, 1), (3, 5)]
    assert difference(TorchSdpa, make_case(problem, rows, seed=1, poison=200.0)) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 3])
def test_what_lies_beyond_a_context_has_no_weight(window: int | None) -> None:
    """Bits are equal whatever the free places of the cache hold, so nothing of an earlier owner gets through."""
    problem = make_problem(window=window)
    rows = [(29, 1), (17, 1), (2, 6), (0, 3), (5, 1)]
    outputs = []
    for poison in (0.0, 3e4):
        case = make_case(problem, rows, seed=2, poison=poison)
        outputs.append(TorchSdpa(problem).forward(case.query, case.cache[0], case.batch))
    assert torch.equal(*outputs)


def test_queries_may_be_a_view() -> None:
    problem = make_problem()
    case = make_case(problem, [(9, 1), (0, 5), (3, 1)], seed=3)
    packed = torch.cat((case.query, torch.randn(case.query.shape)), dim=1)
    view = packed[:, : problem.num_heads]
    kernel = TorchSdpa(problem)
    output = kernel.forward(view, case.cache[0], case.batch)
    assert not view.is_contiguous()
    assert torch.equal(output, kernel.forward(case.query, case.cache[0], case.batch))
