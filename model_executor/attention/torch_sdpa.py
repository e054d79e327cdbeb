"""Attention on gathered blocks with torch's scaled_dot_product_attention.

Decode rows are computed group by group, padded to the group's longest context, so that padding at most doubles the
work. The query heads that share a KV head stand as several queries of that head, so each key is read once.
The other rows are computed one by one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.attention.spec import AttentionKernel, AttentionProblem, KernelSpec, Limits
from model_executor.attention.torch_ref import visible
from model_executor.batch import BatchInputs, DecodeGroup
from model_executor.kv_cache import LayerCache


class TorchSdpa:
    """See the module.

    Args:
        problem: what to compute.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem

    def forward(self, query: Tensor, layer_cache: LayerCache, batch: BatchInputs) -> Tensor:
        """See AttentionKernel."""
        output = torch.empty_like(query)
        for group in batch.decode_groups:
            output[group.first : group.last] = self._decode(query[group.first : group.last], layer_cache, batch, group)
        first = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            last = first + batch.query_lens[row]
            output[first:last] = self._prefill(query[first:last], layer_cache, batch, row)
            first = last
        return output

    def _decode(self, query: Tensor, cache: LayerCache, batch: BatchInputs, group: DecodeGroup) -> Tensor:
        rows, length = group.last - group.first, group.context_len
        blocks = -(-length // cache.block_size)
        table = batch.block_tables[group.first : group.last, :blocks]
        key, value = (_gather(x, table)[:, :length].transpose(1, 2) for x in (cache.key, cache.value))
        per_head = query.view(rows, self._problem.num_kv_heads, -1, self._problem.head_dim)
        mask = batch.once(("decode", group.first, self._problem.window), lambda: self._decode_mask(batch, group))
        output = F.scaled_dot_product_attention(per_head, key, value, attn_mask=mask, scale=self._problem.scale)
        return output.reshape(query.shape)

    def _decode_mask(self, batch: BatchInputs, group: DecodeGroup) -> Tensor | None:
        """bool [rows, 1, 1, context_len]; None when every row sees all of it."""
        window, length = self._problem.window, group.context_len
        contexts = batch.context_lens_host[group.first : group.last]
        if contexts[-1] == length and (window is None or window >= length):
            return None
        ends = batch.context_lens[group.first : group.last, None]
        places = torch.arange(length, device=ends.device)
        seen = places < ends
        if window is not None:
            seen &= places >= ends - window
        return seen[:, None, None]

    def _prefill(self, query: Tensor, cache: LayerCache, batch: BatchInputs, row: int) -> Tensor:
        count, context = batch.query_lens[row], batch.context_lens_host[row]
        window = self._problem.window
        table = batch.block_tables[row : row + 1, : -(-context // cache.block_size)]
        key, value = (_gather(x, table)[:, :context].transpose(1, 2) for x in (cache.key, cache.value))
        plain = count == context and (window is None or window >= context)
        mask = None
        if not plain:
            mask = batch.once(
                ("prefill", row, window), lambda: visible(context - count, count, context, window, query.device)
            )
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            attn_mask=mask,
            is_causal=plain,
            scale=self._problem.scale,
            enable_gqa=self._problem.num_heads != self._problem.num_kv_heads,
        )
        return output[0].transpose(0, 1)


def _gather(cache: Tensor, table: Tensor) -> Tensor:
    """Blocks [rows, B] of a cache as [rows, B * block_size, num_kv_heads, head_dim]."""
    blocks = cache.index_select(0, table.flatten())
    return blocks.view(table.shape[0], -1, *cache.shape[2:])


SPEC: KernelSpec[AttentionKernel] = KernelSpec("torch_sdpa", Limits(soft_cap=False), TorchSdpa)
