"""A whole forward pass as one call of the library: what a CUDA graph is on a GPU.

Between two operators in Python a step would wait for the interpreter, some 0.2 ms a block: as long as the operators
themselves take for one row. The program holds the same kernels with buffers of fixed addresses, so its results are the
bits of the modules' own forward pass.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, addressof

import torch
from torch import Tensor

from model_executor.batch import BatchInputs
from model_executor.kv_cache import KVCache, LayerCache
from model_executor.layers.attention import GroupedAttention
from model_executor.layers.embedding import TiedHead
from model_executor.layers.linear import Linear
from model_executor.layers.mlp import GatedMlp
from model_executor.layers.norm import RmsNorm
from model_executor.layers.rotary import Rotary
from model_executor.models.decoder import Block, Decoder, SandwichBlock
from model_executor.native.attention import FusedHeads, PagedAttention
from model_executor.native.library import (
    EmbedStruct,
    GroupStruct,
    InputsStruct,
    Native,
    NormStruct,
    OperationStruct,
    StepStruct,
)
from model_executor.native.linear import PackedProduct
from model_executor.native.norm import NativeNorm

# The operations of program.c.
EMBED, NORM, LINEAR, HEADS, ATTENTION, GATHER, HEAD = range(7)


class Program:
    """The forward pass of one model over one cache.

    Args:
        native: that computes.
        model: whose kernels are all the library's, see `why_not`.
        cache: of its blocks.
        max_tokens: most tokens of a step.
        max_samples: most rows of a step that sample.
    """

    def __init__(self, native: Native, model: Decoder, cache: KVCache, max_tokens: int, max_samples: int) -> None:
        self._native = native
        self._groups = (GroupStruct * len(cache.pools))()
        self._soft_cap = model.final_soft_cap
        builder = Builder(native, model, cache, max_tokens, max_samples)
        # The operations point to what it holds.
        self._builder = builder
        self._body = _array(builder.body)
        self._whole = _array([*builder.body, *builder.head])
        self._logits = builder.logits

    def run(self, batch: BatchInputs) -> Tensor:
        """float32 [S, V] of the rows that sample, valid until the next run."""
        samples = batch.sample_index.shape[0]
        for index, group in enumerate(self._groups):
            seen = batch.of_group(index)
            group.slots, group.tables = seen.slot_mapping.data_ptr(), seen.block_tables.data_ptr()
            group.table_stride = seen.block_tables.stride(0)
        inputs = InputsStruct(
            batch.num_tokens,
            batch.block_tables.shape[0],
            samples,
            batch.token_ids.data_ptr(),
            batch.positions.data_ptr(),
            batch.query_start.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.sample_index.data_ptr(),
            addressof(self._groups),
        )
        self._native.program(self._whole if samples else self._body, inputs)
        logits = self._logits[:samples]
        return logits if self._soft_cap is None else torch.tanh(logits / self._soft_cap) * self._soft_cap


class Builder:
    """Walks a model and lists its operations.

    Args:
        native, model, cache, max_tokens, max_samples: see Program.

    Attributes:
        body: up to the final norm.
        head: the logits of the rows that sample.
        logits: where they appear.
        kept: what the operations point to, besides the buffers.
    """

    def __init__(self, native: Native, model: Decoder, cache: KVCache, max_tokens: int, max_samples: int) -> None:
        self._native = native
        self.kept: list[object] = [model, cache]
        self.body: list[OperationStruct] = []
        self.head: list[OperationStruct] = []
        table = model.embedding.weight
        width = table.shape[1]
        self._max_tokens = max_tokens
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._hidden, self._normed, self._added = (self._buffer(use, width) for use in ("hidden", "normed", "added"))
        embed = EmbedStruct(table=table.data_ptr(), out=self._hidden.data_ptr(), width=width)
        embed.scale = model.embedding.scale
        self._list(self.body, EMBED, embed)
        added: Tensor | None = None
        for index, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            rotary = model.rotaries[model.rotary_of_block[index]]
            added = self._block(block, rotary, cache.layers[index], cache.group_of[index], added)
        self._norm(model.norm, self._hidden, added, self._normed)
        self.logits = self._rows(max_samples, table.shape[0])
        picked = self._rows(max_samples, width)
        self.kept.append(picked)
        self._list(
            self.head, GATHER, EmbedStruct(table=self._normed.data_ptr(), out=picked.data_ptr(), width=width, scale=1.0)
        )
        self._linear(self.head, HEAD, model.head, picked, self.logits)

    def _block(self, block: Block, rotary: object, cache: LayerCache, group: int, added: Tensor | None) -> Tensor:
        """Both parts of a block; gives what is still to be added to the hidden state."""
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, GroupedAttention)
        assert isinstance(mlp, GatedMlp)
        self._norm(block.attention_norm, self._hidden, added, self._normed)
        self._attention(attention, rotary, cache, group)
        if isinstance(block, SandwichBlock):
            self._norm(block.attention_out_norm, self._added, None, self._added)
        self._norm(block.mlp_norm, self._hidden, self._added, self._normed)
        gated = self._buffer("gated", _product(mlp.down).problem.inputs)
        self._linear(self.body, LINEAR, mlp.gate_up, self._normed, gated)
        self._linear(self.body, LINEAR, mlp.down, gated, self._added)
        if isinstance(block, SandwichBlock):
            self._norm(block.mlp_out_norm, self._added, None, self._added)
        return self._added

    def _attention(self, attention: GroupedAttention, rotary: object, cache: LayerCache, group: int) -> None:
        spec, kernels = attention.spec, attention.kernels
        assert isinstance(kernels.heads, FusedHeads)
        assert isinstance(kernels.attention, PagedAttention)
        projected = self._buffer("projected", (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        attended = self._buffer("attended", spec.num_heads * spec.head_dim)
        self._linear(self.body, LINEAR, attention.qkv, self._normed, projected)
        tables = (rotary.cos, rotary.sin) if isinstance(rotary, Rotary) else None
        self._list(self.body, HEADS, kernels.heads.struct(projected, tables, attention.qk_norm, cache), group=group)
        step = StepStruct(
            query=projected.data_ptr(),
            query_stride=projected.shape[1],
            out=attended.data_ptr(),
            key=cache.key.data_ptr(),
            value=cache.value.data_ptr(),
        )
        self.kept.append(step)
        self._list(self.body, ATTENTION, kernels.attention.struct, group=group, step=addressof(step))
        self._linear(self.body, LINEAR, attention.output, attended, self._added)

    def _norm(self, norm: RmsNorm, x: Tensor, add: Tensor | None, out: Tensor) -> None:
        kernel = norm.kernel
        assert isinstance(kernel, NativeNorm)
        struct = NormStruct(
            x=x.data_ptr(),
            add=None if add is None else add.data_ptr(),
            weight=norm.weight.data_ptr(),
            out=out.data_ptr(),
            width=kernel.problem.size,
            offset=float(kernel.problem.offset),
            eps=kernel.problem.eps,
        )
        self._list(self.body, NORM, struct)

    def _linear(
        self, into: list[OperationStruct], what: int, module: Linear | TiedHead, x: Tensor, out: Tensor
    ) -> None:
        self._list(
            into,
            what,
            _product(module).struct,
            in_=x.data_ptr(),
            out=out.data_ptr(),
            in_stride=x.shape[1],
            out_stride=out.shape[1],
        )

    def _list(self, into: list[OperationStruct], what: int, kernel: Structure, **fields: int) -> None:
        self.kept.append(kernel)
        into.append(OperationStruct(what=what, kernel=addressof(kernel), **fields))

    def _buffer(self, use: str, width: int) -> Tensor:
        """Rows for the tokens of a step. All blocks share them, so that they stay in the processor's caches."""
        if (use, width) not in self._buffers:
            self._buffers[use, width] = self._rows(self._max_tokens, width)
        return self._buffers[use, width]

    def _rows(self, count: int, width: int) -> Tensor:
        return self._native.memory.take(4 * count * width).view(torch.float32).view(count, width)


def _product(module: Linear | TiedHead) -> PackedProduct:
    assert isinstance(module.product, PackedProduct)
    return module.product


def _array(operations: list[OperationStruct]) -> ctypes.Array[OperationStruct]:
    return (OperationStruct * len(operations))(*operations)


def why_not(model: Decoder) -> str | None:
    """Why the model has no program; None: it has one."""
    for block in model.blocks:
        assert isinstance(block, Block)
        if not isinstance(block.attention, GroupedAttention) or not isinstance(block.mlp, GatedMlp):
            return "a block has another attention or feed-forward part than the library computes"
        kernels = block.attention.kernels
        if not isinstance(kernels.heads, FusedHeads) or not isinstance(kernels.attention, PagedAttention):
            return "the attention of a block is not computed by the library"
    for module in model.modules():
        if isinstance(module, Linear | TiedHead) and not isinstance(module.product, PackedProduct):
            return "a weight is not packed"
        if isinstance(module, RmsNorm) and not isinstance(module.kernel, NativeNorm):
            return "a norm is not computed by the library"
    return None
