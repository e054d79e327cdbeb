"""Latent attention with the up-projection absorbed into the queries and the output (DeepSeek-AI, 2024, section 2.1.2).

q . (W c) = (W^T q) . c: with W^T applied to the query, all heads attend to the latents themselves as to the keys of one
shared head, and the values' part of W is applied once to the sum. Nothing is made for each token of the context, so
this is the form for rows of few tokens. For many tokens the larger scores cost more than making keys and values once;
those rows make them, a slice of the heads at a time.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.attention.gathered import group_view
from model_executor.attention.mla import MlaProblem, MlaSpec
from model_executor.attention.torch_ref import visible
from model_executor.batch import BatchInputs, DecodeGroup
from model_executor.kv_cache import LayerCache
from model_executor.layers.operator import OperatorSpec

EXPANDED_BYTES: Final = 64 * 2**20
"""Most bytes of keys and values made at once, if more than one head fits."""


class MlaAbsorbed:
    """See the module.

    Args:
        problem: what to compute.
    """

    def __init__(self, problem: MlaProblem) -> None:
        self._problem = problem

    def forward(self, query: Tensor, up: Tensor, layer_cache: LayerCache, batch: BatchInputs) -> Tensor:
        """See MlaKernel."""
        problem = self._problem
        output = query.new_empty((*query.shape[:2], problem.value_dim))
        weights = up.view(problem.kv_rank, problem.num_heads, -1)
        for group in batch.decode_groups:
            rows = slice(group.first, group.last)
            output[rows] = self._decode(query[rows], weights, layer_cache, batch, group)
        first = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            last = first + batch.query_lens[row]
            output[first:last] = self._row(query[first:last], weights, layer_cache, batch, row)
            first = last
        return output

    def absorbs(self, count: int) -> bool:
        """Whether a row of so many tokens is cheaper with the weights absorbed, whatever its context.

        Both forms cost a number of multiplications for each token of the context and each head.
        """
        problem = self._problem
        absorbed = count * (2 * problem.kv_rank + problem.rope_dim)
        made = problem.kv_rank * (problem.nope_dim + problem.value_dim)
        return absorbed <= made + count * (problem.nope_dim + problem.rope_dim + problem.value_dim)

    def _decode(
        self, query: Tensor, weights: Tensor, cache: LayerCache, batch: BatchInputs, group: DecodeGroup
    ) -> Tensor:
        view = batch.once(("group", group.first, None), lambda: group_view(batch, group, None, cache.block_size))
        latents = _gather(cache, view.table)[:, : view.last].to(query.dtype)
        # The heads stand as queries of one head, so each latent is read once.
        return self._give_values(self._scored(self._absorb(query, weights), latents, view.mask), weights)

    def _row(self, query: Tensor, weights: Tensor, cache: LayerCache, batch: BatchInputs, row: int) -> Tensor:
        count, context = query.shape[0], batch.context_lens_host[row]
        table = batch.block_tables[row : row + 1, : -(-context // cache.block_size)]
        latents = _gather(cache, table)[0, :context].to(query.dtype)
        mask = batch.once(("mla_row", row), lambda: visible(context - count, count, context, None, query.device))
        if not self.absorbs(count):
            return self._expanded(query, weights, latents, mask)
        by_head = mask.repeat_interleave(self._problem.num_heads, dim=0)
        flat = self._absorb(query, weights).flatten(0, 1)[None]
        summed = self._scored(flat, latents[None], by_head)
        return self._give_values(summed.view(count, self._problem.num_heads, -1), weights)

    def _absorb(self, query: Tensor, weights: Tensor) -> Tensor:
        """[T, H, nope + rope] to queries of latents, [T, H, kv_rank + rope]."""
        nope, rope = torch.split(query, [self._problem.nope_dim, self._problem.rope_dim], dim=-1)
        keys = weights[..., : self._problem.nope_dim].permute(1, 2, 0)
        return torch.cat((torch.bmm(nope.transpose(0, 1), keys).transpose(0, 1), rope), dim=-1)

    def _scored(self, query: Tensor, latents: Tensor, mask: Tensor | None) -> Tensor:
        """Sums of latents: [R, Q, kv_rank + rope] over [R, C, kv_rank + rope] to [R, Q, kv_rank]."""
        value = latents[..., : self._problem.kv_rank]
        summed = F.scaled_dot_product_attention(
            query[:, None], latents[:, None], value[:, None], attn_mask=mask, scale=self._problem.scale
        )
        return summed[:, 0]

    def _give_values(self, summed: Tensor, weights: Tensor) -> Tensor:
        """Sums of latents [T, H, kv_rank] to [T, H, value_dim]."""
        values = weights[..., self._problem.nope_dim :].transpose(0, 1)
        return torch.bmm(summed.transpose(0, 1), values).transpose(0, 1)

    def _expanded(self, query: Tensor, weights: Tensor, latents: Tensor, mask: Tensor) -> Tensor:
        """[Q, H, nope + rope] over [C, kv_rank + rope] to [Q, H, value_dim], with keys and values made."""
        problem, context = self._problem, latents.shape[0]
        head_bytes = context * (problem.nope_dim + problem.rope_dim + problem.value_dim) * latents.element_size()
        portion = max(1, EXPANDED_BYTES // head_bytes)
        latent, rope = torch.split(latents, [problem.kv_rank, problem.rope_dim], dim=-1)
        parts: list[Tensor] = []
        for heads in torch.split(weights, portion, dim=1):
            made = (latent @ heads.flatten(1)).view(context, heads.shape[1], -1)
            nope, value = torch.split(made, [problem.nope_dim, problem.value_dim], dim=-1)
            key = torch.cat((nope, rope[:, None].expand(-1, heads.shape[1], -1)), dim=-1)
            first = sum(part.shape[1] for part in parts)
            mine = query[:, first : first + heads.shape[1]]
            parts.append(self._dense(mine, key, value, mask))
        return torch.cat(parts, dim=1)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self._problem.scale)
        return output[0].transpose(0, 1)


def _gather(cache: LayerCache, table: Tensor) -> Tensor:
    """Blocks [R, B] of latents as [R, B * block_size, kv_rank + rope_dim]."""
    blocks = cache.key.index_select(0, table.flatten())
    return blocks.view(table.shape[0], -1, cache.key.shape[-1])


SPEC: Final[MlaSpec] = OperatorSpec("mla_absorbed", MlaAbsorbed)
