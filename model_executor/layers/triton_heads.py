"""Operator "heads" in Triton; the kernel stands in kernels/heads.py."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model_executor.attention.spec import Layout
from model_executor.batch import BatchInputs
from model_executor.kernels.limits import DTYPES, missing, power_above
from model_executor.kv_cache import LayerCache
from model_executor.layers.heads import HeadsProblem, HeadsSpec
from model_executor.layers.norm import QueryKeyNorm
from model_executor.layers.operator import OperatorSpec
from model_executor.layers.rotary import Rotation

# Of a program: eight to a thread, so that each loads 16 bytes at once.
ELEMENTS: Final = 1024
WARPS: Final = 4


class TritonHeads:
    """One launch. The projection stays as it is. Safe to capture in a CUDA graph.

    Args:
        problem: what to compute.
    """

    layout: Layout = "plain"

    def __init__(self, problem: HeadsProblem) -> None:
        from model_executor.kernels.heads import heads_kernel  # needs triton

        self._kernel = heads_kernel
        self._shape = (problem.num_heads, problem.head_dim)
        width = power_above(problem.head_dim)
        heads = problem.num_heads + 2 * problem.num_kv_heads
        together = min(ELEMENTS // width, power_above(heads))
        self._programs = -(-heads // together)
        self._constants = {
            "HEADS": problem.num_heads,
            "KV_HEADS": problem.num_kv_heads,
            "HEAD_DIM": problem.head_dim,
            "G": together,
            "D": width,
        }

    def forward(
        self,
        projected: Tensor,
        rotation: Rotation | None,
        norm: QueryKeyNorm | None,
        cache: LayerCache,
        batch: BatchInputs,
    ) -> Tensor:
        """See HeadsKernel. Tokens with a negative slot keep nothing."""
        assert projected.stride(1) == 1
        assert cache.key.is_contiguous()
        assert cache.value.is_contiguous()
        tokens = projected.shape[0]
        queries = torch.empty((tokens, *self._shape), dtype=projected.dtype, device=projected.device)
        # What the kernel does not read is given it as the queries.
        cosines, sines, half = queries, queries, 0
        if rotation is not None:
            cosines, sines, half = rotation.cos_table, rotation.sin_table, rotation.cos_table.shape[1]
        if tokens:
            self._kernel[tokens, self._programs](
                *(projected, queries if norm is None else norm.weight, cosines, sines),
                *(batch.positions, batch.slot_mapping, queries, cache.key, cache.value),
                *(projected.stride(0), 0.0 if norm is None else norm.spec.eps),
                **self._constants,
                HALF=half,
                NORMED=norm is not None,
                OFFSET=norm is not None and norm.spec.offset,
                LARGEST=torch.finfo(cache.key.dtype).max,
                num_warps=WARPS,
                # A product and a sum in one rounding would differ from the rotation's two.
                enable_fp_fusion=False,
            )
        return queries


def _limits(problem: HeadsProblem) -> str | None:
    if problem.head_dim > ELEMENTS:
        return f"head_dim {problem.head_dim}: takes up to {ELEMENTS}"
    return missing()


SPEC: Final[HeadsSpec] = OperatorSpec("triton_heads", TritonHeads, frozenset(("cuda",)), DTYPES, _limits)
