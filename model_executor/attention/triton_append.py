"""Writing keys and values into the paged cache in Triton; the kernel stands in kernels/append.py."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model_executor.attention.spec import AppendKernel, AttentionProblem, KernelSpec, Limits
from model_executor.attention.triton_paged import DTYPES, missing, power_above
from model_executor.kv_cache import LayerCache

MOST_ELEMENTS: Final = 2048


class TritonAppend:
    """One launch for keys and values. Safe to capture in a CUDA graph.

    Args:
        problem: whose cache is written.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        from model_executor.kernels.append import append_kernel  # needs triton

        self._kernel = append_kernel
        self._elements = problem.num_kv_heads * problem.head_dim
        width = min(power_above(self._elements), MOST_ELEMENTS)
        self._programs = -(-self._elements // width)
        self._constants = {
            "HEADS": problem.num_kv_heads,
            "HEAD_DIM": problem.head_dim,
            "LARGEST": torch.finfo(problem.dtype).max,
            "WIDTH": width,
        }

    def forward(self, key: Tensor, value: Tensor, layer_cache: LayerCache, slot_mapping: Tensor) -> None:
        """See AppendKernel. Tokens with a negative slot are skipped."""
        assert key.stride(2) == value.stride(2) == 1
        assert layer_cache.key.is_contiguous()
        assert layer_cache.value.is_contiguous()
        if not key.shape[0]:
            return
        self._kernel[key.shape[0], self._programs](
            key,
            value,
            layer_cache.key,
            layer_cache.value,
            slot_mapping,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            **self._constants,
            num_warps=4,
        )


LIMITS: Final = Limits(devices=frozenset(("cuda",)), dtypes=DTYPES, narrow=False)

SPEC: KernelSpec[AppendKernel] = KernelSpec("triton_append", LIMITS, TritonAppend, missing)
