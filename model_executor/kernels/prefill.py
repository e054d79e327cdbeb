"""Triton kernel of attention for rows of several queries, of any lengths. See tile.py for the rules it keeps."""

import triton
import triton.language as tl

from model_executor.kernels.tile import NEVER, attend


@triton.jit
def _row_of_tile(query_start: tl.tensor, rows: tl.tensor, tile: tl.tensor, Q: tl.constexpr) -> tl.tensor:
    """The row that the tile of Q queries belongs to.

    Tiles are dealt out so that no length has to be known at launch: row r owns those from
    (query_start[r] - query_start[0]) // Q + r on, which is enough for its queries and at most one more.
    """
    base = tl.load(query_start)
    low = tile * 0
    high = low + rows
    while low < high:
        middle = (low + high) // 2
        begins = (tl.load(query_start + middle) - base) // Q + middle
        if begins <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(
    do_not_specialize=["rows", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "query_start"],
)
def prefill_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    query_start: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    output_token_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Q queries of one row for the heads of one KV head; grid (tokens // Q + rows, num_kv_heads).

    Args:
        query, output: [all tokens, H, HEAD_DIM] by their strides; heads of the output are contiguous.
        keys, values, block_tables, context_lens, scale: as in decode_kernel.
        query_start: [rows + 1], tokens; its first entry need not be 0.
        rows: how many.
        Q: queries a tile; Q * GROUP is at most M. The other constants are those of decode_kernel.
    """
    # The last tiles see the most keys, so they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of_tile(query_start, rows, tile, Q).to(tl.int64)
    begin = tl.load(query_start + row)
    count = (tl.load(query_start + row + 1) - begin).to(tl.int32)
    skipped = (tile - ((begin - tl.load(query_start)) // Q + row)).to(tl.int32) * Q
    if skipped >= count:
        return
    context = tl.load(context_lens + row).to(tl.int32)
    member = tl.arange(0, M)
    column = tl.arange(0, D)
    number = skipped + member // GROUP
    head = kv_head * GROUP + member % GROUP
    inside = ((number < count) & (member < Q * GROUP))[:, None] & (column < HEAD_DIM)[None, :]
    token = begin.to(tl.int64) + number
    asked = tl.load(
        query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + column[None, :],
        mask=inside,
        other=0.0,
    )
    query_places = context - count + number
    lowest = context - count + skipped
    # The first query sees keys up to `lowest`, the last one up to `top` - 1. Tiles from `open_from` up to `open_to` are
    # seen in full by every query; those before are cut by the window, those after by causality.
    top = tl.minimum(lowest + Q, context)
    open_from = 0
    accumulator = tl.zeros([M, D], tl.float32)
    total = tl.zeros([M], tl.float32)
    highest = tl.full([M], NEVER, tl.float32)
    keys += kv_head * head_stride
    values += kv_head * head_stride
    table = block_tables + row * table_stride
    if WINDOW > 0:
        open_from = tl.cdiv(tl.maximum(top - WINDOW, 0), N) * N
        accumulator, total, highest = attend(
            accumulator,
            total,
            highest,
            asked,
            query_places,
            tl.maximum(lowest - WINDOW + 1, 0) // N * N,
            tl.minimum(open_from, top),
            context,
            keys,
            values,
            table,
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
    open_to = tl.maximum((lowest + 1) // N * N, open_from)
    accumulator, total, highest = attend(
        accumulator,
        total,
        highest,
        asked,
        query_places,
        open_from,
        open_to,
        context,
        keys,
        values,
        table,
        block_stride,
        token_stride,
        scale,
        BLOCK_SIZE,
        HEAD_DIM,
        WINDOW,
        SOFT_CAP,
        N,
        D,
        False,
        WIDEN,
    )
    accumulator, total, highest = attend(
        accumulator,
        total,
        highest,
        asked,
        query_places,
        open_to,
        top,
        context,
        keys,
        values,
        table,
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
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    places = token[:, None] * output_token_stride + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(output + places, result.to(output.dtype.element_ty), mask=inside)
