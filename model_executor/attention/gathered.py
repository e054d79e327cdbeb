"""Attention on gathered blocks: what kernels in plain torch have in common.

Decode rows are computed group by group, padded to the group's longest context, so that padding at most doubles the
work. The query heads that share a KV head stand as several queries of that head, so each key is read once.
The other rows are computed one by one. With a window only the blocks that it touches are gathered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from model_executor.attention.spec import AttentionProblem
from model_executor.attention.torch_ref import visible
from model_executor.batch import BatchInputs, DecodeGroup
from model_executor.kv_cache import LayerCache


@dataclass(frozen=True)
class View:
    """Which keys rows read.

    Attributes:
        table: int64 [rows, B] blocks to gather.
        first, last: of the gathered places these hold the keys.
        mask: bool, which of the keys a query sees: [rows, 1, 1, keys] of decode rows, [queries, keys] of another
            row. None: a decode row sees all, of another row query i sees the keys 0 .. i.
    """

    table: Tensor
    first: int
    last: int
    mask: Tensor | None


class GatheredAttention(ABC):
    """See the module.

    Args:
        problem: what to compute.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem

    @abstractmethod
    def decode(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """One query a row: [rows, num_kv_heads, heads a KV head, head_dim] to the same.

        Args:
            query: of that shape.
            key, value: [rows, num_kv_heads, keys, head_dim].
            mask: see View.
        """

    @abstractmethod
    def prefill(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """The queries of one row: [queries, num_heads, head_dim] to the same.

        Args:
            query: of that shape.
            key, value: [1, num_kv_heads, keys, head_dim].
            mask: see View.
        """

    def forward(self, query: Tensor, layer_cache: LayerCache, batch: BatchInputs) -> Tensor:
        """See AttentionKernel."""
        output = torch.empty_like(query)
        for group in batch.decode_groups:
            output[group.first : group.last] = self._group(query[group.first : group.last], layer_cache, batch, group)
        first = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            last = first + batch.query_lens[row]
            output[first:last] = self._row(query[first:last], layer_cache, batch, row)
            first = last
        return output

    def _group(self, query: Tensor, cache: LayerCache, batch: BatchInputs, group: DecodeGroup) -> Tensor:
        window, size = self.problem.window, cache.block_size
        view = batch.once(("group", group.first, window), lambda: group_view(batch, group, window, size))
        per_head = query.view(query.shape[0], self.problem.num_kv_heads, -1, self.problem.head_dim)
        key, value = (_gather(kept, view).to(query.dtype) for kept in (cache.key, cache.value))
        return self.decode(per_head, key, value, view.mask).reshape(query.shape)

    def _row(self, query: Tensor, cache: LayerCache, batch: BatchInputs, row: int) -> Tensor:
        window, size = self.problem.window, cache.block_size
        view = batch.once(("row", row, window), lambda: row_view(batch, row, window, size))
        key, value = (_gather(kept, view).to(query.dtype) for kept in (cache.key, cache.value))
        return self.prefill(query, key, value, view.mask)


def group_view(batch: BatchInputs, group: DecodeGroup, window: int | None, block_size: int) -> View:
    """What the decode rows of a group read."""
    rows, length = slice(group.first, group.last), group.context_len
    ends, table = batch.context_lens[rows, None], batch.block_tables[rows]
    blocks = -(-length // block_size)
    if window is None or window >= length:
        equal = batch.context_lens_host[group.last - 1] == length
        seen = None if equal else (torch.arange(length, device=ends.device) < ends)[:, None, None]
        return View(table[:, :blocks], 0, length, seen)
    # A window that begins at the last place of a block touches one block more than its length fills.
    touched = min(blocks, -(-(window - 1) // block_size) + 1)
    first_blocks = (ends - window).clamp(min=0) // block_size
    wanted = first_blocks + torch.arange(touched, device=ends.device)
    places = first_blocks * block_size + torch.arange(touched * block_size, device=ends.device)
    # Past a row's last block the table may end; those places lie beyond the context, so any block will do.
    chosen = table.gather(1, wanted.clamp(max=table.shape[1] - 1))
    return View(chosen, 0, touched * block_size, ((places < ends) & (places >= ends - window))[:, None, None])


def row_view(batch: BatchInputs, row: int, window: int | None, block_size: int) -> View:
    """What a row of several queries reads."""
    count, context = batch.query_lens[row], batch.context_lens_host[row]
    start = context - count
    lowest = 0 if window is None else max(0, start - window + 1)
    first_block = lowest // block_size
    table = batch.block_tables[row : row + 1, first_block : -(-context // block_size)]
    begin = first_block * block_size
    if count == context and (window is None or window >= context):
        return View(table, 0, context, None)
    mask = visible(start - lowest, count, context - lowest, window, table.device)
    return View(table, lowest - begin, context - begin, mask)


def _gather(cache: Tensor, view: View) -> Tensor:
    """Keys or values that a view names: [rows, num_kv_heads, keys, head_dim]."""
    blocks = cache.index_select(0, view.table.flatten())
    places = blocks.view(view.table.shape[0], -1, *cache.shape[2:])
    return places[:, view.first : view.last].transpose(1, 2)
