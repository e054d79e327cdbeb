"""Triton kernel of what stands between the projection of a token and its attention."""

import triton
import triton.language as tl

from model_executor.kernels.norm import scaled


@triton.jit
def _rounded(x: tl.tensor, dtype: tl.dtype) -> tl.tensor:
    return x.to(dtype).to(tl.float32)


@triton.jit
def _finite(x: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """NaN as 0, and what is beyond -LARGEST .. LARGEST as the nearer of the two."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def heads_kernel(
    projected: tl.tensor,
    norm_weight: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    token_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
    LARGEST: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
) -> None:
    """G heads of one token; grid (tokens, HEADS + 2 * KV_HEADS over G, rounded up).

    It rounds where the steps one after the other would.

    Args:
        projected: [tokens, HEADS + 2 * KV_HEADS, HEAD_DIM] by token_stride: queries, keys, values.
        norm_weight: [2, HEAD_DIM] for queries and for keys, read if NORMED; OFFSET: see NormSpec.
        cosines, sines: [positions, HALF], for the leading 2 * HALF elements of a head; HALF 0: no rotation.
        positions, slot_mapping: [tokens]; keys and values of a token with a negative slot go nowhere.
        queries: [tokens, HEADS, HEAD_DIM], contiguous.
        keys, values: [slots, KV_HEADS, HEAD_DIM], contiguous; LARGEST: of their dtype.
        D: HEAD_DIM, padded to a power of two; so is G.
    """
    dtype = projected.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * G + tl.arange(0, G)
    column = tl.arange(0, D)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    source = projected + token * token_stride + head[:, None] * HEAD_DIM
    x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    # Values are taken as they are.
    changed = inside & (head < HEADS + KV_HEADS)[:, None]
    made = x
    weights = norm_weight + tl.where(head < HEADS, 0, HEAD_DIM)[:, None]
    factor = x
    if NORMED:
        factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(weights + column[None, :], mask=changed, other=0.0)
        made = tl.where(changed, _rounded(scaled(x * factor, weight, dtype, OFFSET), dtype), x)
    if HALF > 0:
        # The other element of each pair is loaded too: it is in a cache, and threads need not exchange theirs.
        first = column < HALF
        paired = changed & (column < 2 * HALF)[None, :]
        partner = tl.where(first, column + HALF, column - HALF)
        other = tl.load(source + partner[None, :], mask=paired, other=0.0).to(tl.float32)
        if NORMED:
            weight = tl.load(weights + partner[None, :], mask=paired, other=0.0)
            other = _rounded(scaled(other * factor, weight, dtype, OFFSET), dtype)
        angle = tl.load(positions + token) * HALF + tl.where(first, column, partner)
        cosine = tl.load(cosines + angle, mask=column < 2 * HALF, other=0.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=column < 2 * HALF, other=0.0).to(tl.float32)
        along = _rounded(made * cosine[None, :], dtype)
        across = _rounded(other * sine[None, :], dtype)
        turned = tl.where(first[None, :], along - across, along + across)
        made = tl.where(paired, _rounded(turned, dtype), made)
    place = (token * HEADS + head[:, None]) * HEAD_DIM + column[None, :]
    tl.store(queries + place, made.to(dtype), mask=inside & (head < HEADS)[:, None])
    slot = tl.load(slot_mapping + token).to(tl.int64)
    kept = _finite(made, LARGEST).to(keys.dtype.element_ty)
    kv_head = head - HEADS
    key_head = (kv_head >= 0) & (kv_head < KV_HEADS) & (slot >= 0)
    row = slot * KV_HEADS + kv_head[:, None]
    tl.store(keys + row * HEAD_DIM + column[None, :], kept, mask=inside & key_head[:, None])
    value_head = (kv_head >= KV_HEADS) & (slot >= 0)
    tl.store(values + (row - KV_HEADS) * HEAD_DIM + column[None, :], kept, mask=inside & value_head[:, None])
