"""Latent attention (MLA; DeepSeek-AI, 2024): the operators on a cache that keeps one latent a token, and their oracle.

The cache holds, for each token, the latent that keys and values of all heads are made from and, behind it, the rotated
part of the key, which all heads share. Operator "mla_attention" makes the rest of keys and values from the latents
while it reads them; operator "kv_append" writes the latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from model_executor.attention.torch_ref import visible
from model_executor.batch import BatchInputs
from model_executor.kv_cache import LayerCache, finite
from model_executor.layers.operator import OperatorSpec


@dataclass(frozen=True)
class MlaProblem:
    """Causal latent attention of one layer class over the paged cache.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of queries, and of latents before they are kept.
        num_heads: of queries.
        kv_rank: elements of a latent.
        nope_dim, rope_dim: elements of a query head and of a key head that are not rotated, and that are.
        value_dim: elements of a head of values.
        block_size: tokens a KV block.
        scale: factor on the scores.
    """

    device: str
    dtype: torch.dtype
    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    block_size: int
    scale: float

    def __str__(self) -> str:
        return (
            f"{self.device} {str(self.dtype).removeprefix('torch.')} {self.num_heads} heads of"
            f" {self.nope_dim}+{self.rope_dim}/{self.value_dim} from latents of {self.kv_rank},"
            f" blocks of {self.block_size}"
        )


class MlaKernel(Protocol):
    """Operator "mla_attention"."""

    def forward(self, query: Tensor, up: Tensor, layer_cache: LayerCache, batch: BatchInputs) -> Tensor:
        """Attention output [T, num_heads, value_dim].

        The latents of this step's tokens are in the cache already.

        Args:
            query: [T, num_heads, nope_dim + rope_dim], the last rope_dim elements rotated.
            up: [kv_rank, num_heads * (nope_dim + value_dim)]: latent @ up is, for each head, the part of the key that
                is not rotated, then the value.
            layer_cache: keys [blocks + 1, block_size, 1, kv_rank + rope_dim].
            batch: of the step.
        """
        ...


class LatentAppendKernel(Protocol):
    """Operator "kv_append" of a cache of latents."""

    def forward(self, latent: Tensor, layer_cache: LayerCache, slot_mapping: Tensor) -> None:
        """Write latent, [T, kv_rank + rope_dim], at slot_mapping, int64 [T]; no slot stands twice, except slots of
        the scratch block. What is not finite is replaced: see kv_cache.
        """
        ...


@dataclass(frozen=True)
class LatentKernels:
    """The kernels chosen for one class of latent attention.

    Attributes:
        attention: reads the cache.
        kv_append: writes it.
    """

    attention: MlaKernel
    kv_append: LatentAppendKernel


class MlaReference:
    """Keys and values of each row made in full, then softmax(scale * q k^T + mask) v, in float32.

    Args:
        problem: what to compute.
    """

    def __init__(self, problem: MlaProblem) -> None:
        self._problem = problem

    def forward(self, query: Tensor, up: Tensor, layer_cache: LayerCache, batch: BatchInputs) -> Tensor:
        """See MlaKernel."""
        problem = self._problem
        output = query.new_empty((*query.shape[:2], problem.value_dim))
        size = layer_cache.block_size
        latents, _ = layer_cache.slots()
        first = 0
        for row, (count, context) in enumerate(zip(batch.query_lens, batch.context_lens_host, strict=True)):
            places = torch.arange(context, device=query.device)
            slots = batch.block_tables[row][places // size] * size + places % size
            tokens = slice(first, first + count)
            output[tokens] = self._row(query[tokens], up, latents[slots, 0].float(), context - count)
            first += count
        return output

    def _row(self, query: Tensor, up: Tensor, latents: Tensor, start: int) -> Tensor:
        problem, context = self._problem, latents.shape[0]
        made = (latents[:, : problem.kv_rank] @ up.float()).view(context, problem.num_heads, -1)
        nope, value = torch.split(made, [problem.nope_dim, problem.value_dim], dim=-1)
        rope = latents[:, None, problem.kv_rank :].expand(-1, problem.num_heads, -1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), torch.cat((nope, rope), dim=-1)) * problem.scale
        seen = visible(start, query.shape[0], context, None, query.device)
        scores = scores.masked_fill(~seen, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)


class LatentCopy:
    """Writes latents through one indexed copy.

    Args:
        problem: whose cache is written.
    """

    def __init__(self, problem: MlaProblem) -> None:
        del problem

    def forward(self, latent: Tensor, layer_cache: LayerCache, slot_mapping: Tensor) -> None:
        """See LatentAppendKernel."""
        latents = layer_cache.slots()[0]
        latents.index_copy_(0, slot_mapping, finite(latent, latents.dtype)[:, None])


MlaSpec: TypeAlias = OperatorSpec[MlaProblem, MlaKernel]
LatentAppendSpec: TypeAlias = OperatorSpec[MlaProblem, LatentAppendKernel]
SPEC: Final[MlaSpec] = OperatorSpec("mla_ref", MlaReference)
APPEND_SPEC: Final[LatentAppendSpec] = OperatorSpec("latent_copy", LatentCopy)
