"""Triton kernel of the root-mean-square norm, and of the sum before it."""

import triton
import triton.language as tl


@triton.jit
def scaled(unit: tl.tensor, weight: tl.tensor, dtype: tl.dtype, OFFSET: tl.constexpr) -> tl.tensor:
    """A norm's product with its weight in float32, rounded before where layers/norm.py rounds, but not after."""
    factor = weight.to(tl.float32)
    if OFFSET:
        factor += 1.0
    else:
        unit = unit.to(dtype).to(tl.float32)
    return unit * factor


@triton.jit
def norm_kernel(
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    row_stride: tl.tensor,
    added_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One row; grid (rows,).

    Args:
        x, added: [rows, SIZE] by their strides; with ADDS, x becomes the sum of both, rounded to its dtype.
        weight: [SIZE].
        output: [rows, SIZE], contiguous.
        WIDTH: SIZE, padded to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    place = x + row * row_stride + column
    wide = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(added + row * added_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = (wide + more).to(x.dtype.element_ty)
        tl.store(place, total, mask=inside)
        wide = total.to(tl.float32)
    unit = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    product = scaled(unit, tl.load(weight + column, mask=inside, other=0.0), output.dtype.element_ty, OFFSET)
    tl.store(output + row * SIZE + column, product.to(output.dtype.element_ty), mask=inside)
