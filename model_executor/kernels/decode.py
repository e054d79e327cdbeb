"""Triton kernels of attention for rows of one query: the context is cut into a fixed number of splits, whose partial
results a second kernel joins (Flash-Decoding, 2023). See tile.py for the rules they keep.
"""

import triton
import triton.language as tl

from model_executor.kernels.tile import NEVER, attend


@triton.jit
def _decode_tiles(
    context: tl.tensor, splits: tl.tensor, split_tiles: tl.tensor, WINDOW: tl.constexpr, N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How the last position of a context is split: its first tile, the tile after its last, and tiles a split."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0) // N
    end = tl.cdiv(context, N)
    width = tl.maximum(tl.cdiv(end - begin, splits), split_tiles)
    return begin, end, width


@triton.jit(
    do_not_specialize=["table_stride", "splits", "split_tiles"],
    do_not_specialize_on_alignment=["block_tables", "context_lens"],
)
def decode_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    partial: tl.tensor,
    weight: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    splits: tl.tensor,
    split_tiles: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """One split of one row's context for the heads of one KV head; grid (rows, num_kv_heads, splits).

    Row r's query is token r, at position context_lens[r] - 1.

    Args:
        query: [rows, H, HEAD_DIM] by its strides.
        keys, values: [blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM] by the strides.
        block_tables: [rows, B], table_stride from row to row; context_lens: [rows].
        partial: float32 [rows, H, splits, HEAD_DIM], contiguous: the split's own attention output.
        weight: float32 [rows, H, splits]: base-2 logarithm of the split's sum of exponentials.
        split_tiles: fewest tiles a split takes.
        GROUP: query heads a KV head. M, D: GROUP and HEAD_DIM, padded. N: keys a tile.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens + row).to(tl.int32)
    begin, end, width = _decode_tiles(context, splits, split_tiles, WINDOW, N)
    first = begin + split * width
    if first >= end:
        return
    last = tl.minimum(first + width, end)
    member = tl.arange(0, M)
    column = tl.arange(0, D)
    head = kv_head * GROUP + member
    inside = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    query += row * query_token_stride
    asked = tl.load(query + head[:, None] * query_head_stride + column[None, :], mask=inside, other=0.0)
    accumulator, total, highest = attend(
        tl.zeros([M, D], tl.float32),
        tl.zeros([M], tl.float32),
        tl.full([M], NEVER, tl.float32),
        asked,
        tl.zeros([M], tl.int32) + (context - 1),
        first * N,
        last * N,
        context,
        keys + kv_head * head_stride,
        values + kv_head * head_stride,
        block_tables + row * table_stride,
        block_stride,
        token_stride,
        scale,
        BLOCK_SIZE,
        HEAD_DIM,
        WINDOW,
        SOFT_CAP,
        N,
        D,
        True,
        WIDEN,
    )
    heads = tl.num_programs(1) * GROUP
    cell = (row * heads + head) * splits + split
    # Each split holds a visible key: the first tile of the window reaches into it, so total is above 0.
    tl.store(partial + cell[:, None] * HEAD_DIM + column[None, :], accumulator / total[:, None], mask=inside)
    tl.store(weight + cell, highest + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["split_tiles"], do_not_specialize_on_alignment=["context_lens"])
def join_kernel(
    partial: tl.tensor,
    weight: tl.tensor,
    context_lens: tl.tensor,
    output: tl.tensor,
    split_tiles: tl.tensor,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
) -> None:
    """Join the splits of one row and head; grid (rows, H).

    Args:
        partial, weight, context_lens: of decode_kernel.
        output: [rows, H, HEAD_DIM], contiguous.
        split_tiles, WINDOW, N, D: as decode_kernel had them; SPLITS: its splits, a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    context = tl.load(context_lens + row).to(tl.int32)
    begin, end, width = _decode_tiles(context, SPLITS, split_tiles, WINDOW, N)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, D)
    # Splits beyond the context wrote nothing.
    written = begin + split * width < end
    logs = tl.load(weight + cell * SPLITS + split, mask=written, other=NEVER)
    highest = tl.max(logs, 0)
    shares = tl.exp2(logs - tl.where(highest == NEVER, 0.0, highest))
    places = (cell * SPLITS + split)[:, None] * HEAD_DIM + column[None, :]
    parts = tl.load(partial + places, mask=written[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    total = tl.sum(shares, 0)
    joined = tl.sum(parts * shares[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + cell * HEAD_DIM + column, joined.to(output.dtype.element_ty), mask=column < HEAD_DIM)
