"""A kernel of attention held against the oracle on random paged cases."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st

from model_executor.attention.spec import AttentionKernel, AttentionProblem
from model_executor.attention.torch_ref import TorchReference
from tests.model_executor.paged import Case

# Float32 sums of at most 130 terms of size 1, in another order.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
ROWS = st.lists(
    st.tuples(st.integers(0, 120), st.just(1)) | st.tuples(st.integers(0, 40), st.integers(1, 9)),
    min_size=1,
    max_size=8,
)


def difference(fast_kernel: Callable[[AttentionProblem], AttentionKernel], case: Case) -> float:
    """Largest difference between the fast path and the oracle."""
    fast, oracle = (
        kernel(case.problem).forward(case.query, case.cache[0], case.batch) for kernel in (fast_kernel, TorchReference)
    )
    assert fast.dtype == case.problem.dtype
    return float((fast.float() - oracle.float()).abs().max())
