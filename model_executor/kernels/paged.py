"""Triton kernels of attention over the paged cache: decode with a split context, its reduction, and ragged prefill.

Online softmax over tiles of keys (Dao et al., FlashAttention, 2022); the decode context is cut into a fixed number of
splits whose partial results a second kernel joins (Flash-Decoding, 2023). The query heads of one KV head are rows of
one tile, so that each key and value is read once.

Rules that every kernel here keeps:
- Lengths are read from device memory. A launch depends on the shapes of its tensors alone, so it can be captured.
- A position is loaded only below its row's context length; nothing else of the cache or the block table is read.
- A row without context gives zeros.
- What changes from step to step is not specialized on, or a compilation would interrupt the service.
- Block ids are widened before they are multiplied: a cache may hold more than 2**31 elements.
- Scores are in base 2 after scaling: exp2(x * log2(e)) is exp(x).
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tile(
    cache: tl.tensor,
    places: tl.tensor,
    loaded: tl.tensor,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Rows [N, D] of a cache at element offsets `places` [N]; zeros where not loaded or past the head."""
    column = tl.arange(0, D)
    pointers = cache + places[:, None] + column[None, :]
    if MASKED:
        if HEAD_DIM == D:
            tile = tl.load(pointers, mask=loaded[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=loaded[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == D:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """a @ b in float32; float32 operands are multiplied in full precision.

    WIDEN turns the operands into float32 first: the interpreter multiplies no bfloat16.
    """
    if WIDEN:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def _scores(raw: tl.tensor, scale: tl.tensor, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """Products of queries and keys as base-2 logits: scaled and, with SOFT_CAP above 0, capped."""
    if SOFT_CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both infinities of the exponential.
        grown = tl.exp2(raw * (scale * (2.0 * LOG2_E / SOFT_CAP)))
        logits = (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (grown + 1.0))
    else:
        logits = raw * (scale * LOG2_E)
    return logits


@triton.jit
def _attend(
    accumulator: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    query: tl.tensor,
    query_places: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    context: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    scale: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the tiles of keys that start at first, first + N, ... below last to a running softmax.

    Args:
        accumulator: float32 [M, D], the sum of weighted values, relative to `highest`.
        total, highest: float32 [M], the sum of weights and the largest logit.
        query: [M, D]; query_places: [M], their positions.
        first, last: keys; first is a multiple of N.
        context: keys of the row; none at or beyond it is loaded.
        keys, values: at the KV head; table: of the row.
        WINDOW: 0 for none.
        MASKED: whether a query may not see some key of these tiles, or a tile may pass the context.
        The other arguments are those of the kernels.
    """
    for start in range(first, last, N):
        place = start + tl.arange(0, N)
        loaded = place < context
        if MASKED:
            block = tl.load(table + place // BLOCK_SIZE, mask=loaded, other=0).to(tl.int64)
        else:
            block = tl.load(table + place // BLOCK_SIZE).to(tl.int64)
        offsets = block * block_stride + (place % BLOCK_SIZE) * token_stride
        key = _load_tile(keys, offsets, loaded, HEAD_DIM, D, MASKED)
        logits = _scores(_dot(query, tl.trans(key), WIDEN), scale, SOFT_CAP)
        if MASKED:
            seen = (place[None, :] <= query_places[:, None]) & loaded[None, :]
            if WINDOW > 0:
                seen = seen & (place[None, :] > query_places[:, None] - WINDOW)
            logits = tl.where(seen, logits, NEVER)
        now = tl.maximum(highest, tl.max(logits, 1))
        # A query that has seen nothing yet: weights of zero instead of inf - inf.
        anchor = tl.where(now == NEVER, 0.0, now)
        weights = tl.exp2(logits - anchor[:, None])
        shrink = tl.exp2(highest - anchor)
        total = total * shrink + tl.sum(weights, 1)
        value = _load_tile(values, offsets, loaded, HEAD_DIM, D, MASKED)
        accumulator = accumulator * shrink[:, None] + _dot(weights.to(value.dtype), value, WIDEN)
        highest = now
    return accumulator, total, highest


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
    accumulator, total, highest = _attend(
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
        accumulator, total, highest = _attend(
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
    accumulator, total, highest = _attend(
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
    accumulator, total, highest = _attend(
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
