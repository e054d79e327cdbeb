"""Triton kernel that writes keys and values into the paged cache."""

import triton
import triton.language as tl


@triton.jit
def _finite(x: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """x in float32, NaN as 0 and what is beyond -LARGEST .. LARGEST as the nearer of the two."""
    wide = x.to(tl.float32)
    wide = tl.where(wide == wide, wide, 0.0)
    return tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def append_kernel(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slot_mapping: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Copy one token's key and value to its slot; grid (tokens, HEADS * HEAD_DIM / WIDTH rounded up).

    Args:
        key, value: [tokens, HEADS, HEAD_DIM] by their strides.
        keys, values: [slots, HEADS, HEAD_DIM], contiguous.
        slot_mapping: [tokens]; a token with a negative slot is skipped.
        LARGEST: of the dtype.
        WIDTH: elements a program copies, a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = element < HEADS * HEAD_DIM
    head = element // HEAD_DIM
    column = element % HEAD_DIM
    target = slot * (HEADS * HEAD_DIM) + element
    k = tl.load(key + token * key_token_stride + head * key_head_stride + column, mask=inside)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + column, mask=inside)
    tl.store(keys + target, _finite(k, LARGEST).to(keys.dtype.element_ty), mask=inside)
    tl.store(values + target, _finite(v, LARGEST).to(values.dtype.element_ty), mask=inside)
