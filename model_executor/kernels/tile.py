"""Attention of a tile of queries over tiles of paged keys: the part that decode and prefill share.

Online softmax over tiles of keys (Dao et al., FlashAttention, 2022). The query heads of one KV head are rows of one
tile, so that each key and value is read once.

Rules that the kernels of this package keep:
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
def attend(
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
