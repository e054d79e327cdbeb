"""Operator "attention" over the paged cache, and operator "heads"."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model_executor.attention.spec import AttentionKernel, AttentionProblem, KernelSpec, Layout, Limits
from model_executor.batch import BatchInputs
from model_executor.kv_cache import LayerCache
from model_executor.layers.heads import HeadsKernel, HeadsProblem, HeadsSpec
from model_executor.layers.norm import QueryKeyNorm
from model_executor.layers.operator import OperatorSpec
from model_executor.layers.rotary import Rotation
from model_executor.native.library import AttentionStruct, HeadsStruct, Native, StepStruct
from model_executor.native.linear import KINDS

LANES: Final = 16
# Heads of a KV head that an item of attention.c can hold.
MAX_GROUP: Final = 48
LAYOUT: Final[Layout] = "turned"


class PagedAttention:
    """Attention whose result for a token does not depend, to the bit, on what else the step computes.

    Args:
        native: that computes.
        problem: what to compute.

    Attributes:
        struct: as C takes it.
    """

    def __init__(self, native: Native, problem: AttentionProblem) -> None:
        self._native = native
        self.struct = AttentionStruct(
            problem.num_heads,
            problem.num_kv_heads,
            problem.head_dim,
            problem.block_size,
            KINDS[problem.kept_in],
            problem.window or 0,
            problem.scale,
            problem.soft_cap or 0.0,
        )

    def forward(self, query: Tensor, layer_cache: LayerCache, batch: BatchInputs) -> Tensor:
        """See AttentionKernel."""
        if query.stride()[1:] != (query.shape[2], 1):
            query = query.contiguous()
        out = query.new_empty(query.shape)
        tables = batch.block_tables
        step = StepStruct(
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            layer_cache.key.data_ptr(),
            layer_cache.value.data_ptr(),
            tables.shape[0],
            batch.query_start.data_ptr(),
            batch.context_lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
        )
        self._native.attention(self.struct, step)
        return out


class FusedHeads:
    """Norm of heads, rotation and append in one pass over the projection, which it changes.

    Keys are kept turned within their block, as the attention reads them: see attention.h.

    Args:
        native: that computes.
        problem: what to compute.
    """

    layout: Layout = LAYOUT

    def __init__(self, native: Native, problem: HeadsProblem) -> None:
        self._native = native
        self._problem = problem

    def forward(
        self,
        projected: Tensor,
        rotation: Rotation | None,
        norm: QueryKeyNorm | None,
        cache: LayerCache,
        batch: BatchInputs,
    ) -> Tensor:
        """See HeadsKernel."""
        tables = None if rotation is None else (rotation.cos_table, rotation.sin_table)
        struct = self.struct(projected, tables, norm, cache)
        struct.tokens = projected.shape[0]
        struct.positions, struct.slots = batch.positions.data_ptr(), batch.slot_mapping.data_ptr()
        self._native.heads(struct)
        size = self._problem.head_dim
        return projected[:, : self._problem.num_heads * size].view(-1, self._problem.num_heads, size)

    def struct(
        self,
        projected: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        norm: QueryKeyNorm | None,
        cache: LayerCache,
    ) -> HeadsStruct:
        """What C takes, but for what a batch brings: tokens, positions, slots."""
        problem, size = self._problem, self._problem.head_dim
        struct = HeadsStruct(
            projected=projected.data_ptr(),
            stride=projected.stride(0),
            heads=problem.num_heads,
            kv_heads=problem.num_kv_heads,
            head_dim=size,
            key=cache.key.data_ptr(),
            value=cache.value.data_ptr(),
            block_size=cache.block_size,
            kind=KINDS[cache.key.dtype],
        )
        if tables is not None:
            cosine, sine = tables
            struct.turned = 2 * cosine.shape[1]
            struct.cosine, struct.sine = cosine.data_ptr(), sine.data_ptr()
        if norm is not None:
            struct.query_norm = norm.weight.data_ptr()
            struct.key_norm = norm.weight.data_ptr() + size * norm.weight.element_size()
            struct.norm_offset, struct.norm_eps = float(norm.spec.offset), norm.spec.eps
        return struct


def paged_attention(native: Native) -> KernelSpec[AttentionKernel]:
    """The registry's entry for "attention"."""

    def make(problem: AttentionProblem) -> AttentionKernel:
        return PagedAttention(native, problem)

    limits = Limits(
        devices=frozenset(("cpu",)),
        dtypes=frozenset((torch.float32,)),
        head_dim_multiple=LANES,
        layouts=frozenset((LAYOUT,)),
    )
    return KernelSpec(f"paged_{native.name}", limits, make)


def fused_heads(native: Native) -> HeadsSpec:
    """The registry's entry for "heads"."""

    def make(problem: HeadsProblem) -> HeadsKernel:
        return FusedHeads(native, problem)

    def limits(problem: HeadsProblem) -> str | None:
        """Those of the attention that reads what is written, so that both are chosen or none."""
        group = problem.num_heads // problem.num_kv_heads
        if group > MAX_GROUP:
            return f"{group} heads a KV head: takes up to {MAX_GROUP}"
        for name, value in (("head_dim", problem.head_dim), ("block_size", problem.block_size)):
            if value % LANES:
                return f"{name} {value}: no multiple of {LANES}"
        return None

    return OperatorSpec(f"fused_{native.name}", make, frozenset(("cpu",)), frozenset((torch.float32,)), limits)
