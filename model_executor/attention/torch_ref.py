"""The oracle: attention row by row in plain torch on any device. Slow and easy to check."""

from __future__ import annotations

import torch
from torch import Tensor

from model_executor.attention.spec import AppendKernel, AttentionKernel, AttentionProblem, KernelSpec, Limits
from model_executor.batch import BatchInputs
from model_executor.kv_cache import LayerCache, finite


class TorchReference:
    """softmax(scale * q k^T + mask) v for each row by itself.

    Args:
        problem: what to compute.
        wide: the dtype to compute in.
    """

    def __init__(self, problem: AttentionProblem, wide: torch.dtype = torch.float32) -> None:
        self._problem = problem
        self._wide = wide

    def forward(self, query: Tensor, layer_cache: LayerCache, batch: BatchInputs) -> Tensor:
        """See AttentionKernel."""
        output = torch.empty_like(query)
        size = layer_cache.block_size
        keys, values = layer_cache.slots()
        first = 0
        for row, (count, context) in enumerate(zip(batch.query_lens, batch.context_lens_host, strict=True)):
            start, window = context - count, self._problem.window
            lowest = 0 if window is None else max(0, start - window + 1)
            places = torch.arange(lowest, context, device=query.device)
            table = batch.block_tables[row]
            slots = table[places // size] * size + places % size
            tokens = slice(first, first + count)
            output[tokens] = self._row(query[tokens], keys[slots], values[slots], start - lowest)
            first += count
        return output

    def _row(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """Attention of queries at places start, start + 1, ... over keys at places 0, 1, ..."""
        problem = self._problem
        repeat = problem.num_heads // problem.num_kv_heads
        key = key.to(self._wide).repeat_interleave(repeat, dim=1)
        value = value.to(self._wide).repeat_interleave(repeat, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.to(self._wide), key) * problem.scale
        if problem.soft_cap is not None:
            scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
        seen = visible(start, query.shape[0], key.shape[0], problem.window, query.device)
        scores = scores.masked_fill(~seen, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)


class IndexCopyAppend:
    """Writes through one indexed copy a tensor.

    Args:
        problem: whose cache is written.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        del problem

    def forward(self, key: Tensor, value: Tensor, layer_cache: LayerCache, slot_mapping: Tensor) -> None:
        """See AppendKernel."""
        keys, values = layer_cache.slots()
        keys.index_copy_(0, slot_mapping, finite(key, keys.dtype))
        values.index_copy_(0, slot_mapping, finite(value, values.dtype))


def visible(start: int, count: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """bool [count, context]: which of positions 0 .. context - 1 a query at start, start + 1, ... sees."""
    query = torch.arange(start, start + count, device=device)[:, None]
    key = torch.arange(context, device=device)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return seen


SPEC: KernelSpec[AttentionKernel] = KernelSpec("torch_ref", Limits(), TorchReference)
APPEND_SPEC: KernelSpec[AppendKernel] = KernelSpec("index_copy", Limits(), IndexCopyAppend)
