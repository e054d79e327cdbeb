"""Triton kernel of activation(gate) * up."""

import triton
import triton.language as tl


@triton.jit
def _activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The activation of that name in models/spec.py, of float32."""
    if ACTIVATION == "silu":
        made = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        made = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), which cancels no digits.
        made = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(ACTIVATION == "relu")
        made = tl.where(x < 0.0, 0.0, x)
    return made


@triton.jit
def gated_kernel(
    halves: tl.tensor,
    output: tl.tensor,
    row_stride: tl.tensor,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """WIDTH elements of one row; grid (rows, SIZE / WIDTH rounded up).

    Args:
        halves: [rows, 2 * SIZE] by row_stride: gate, then up.
        output: [rows, SIZE], contiguous.
        ACTIVATION: its name.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < SIZE
    place = halves + row * row_stride + column
    dtype = output.dtype.element_ty
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=inside, other=0.0).to(tl.float32)
    # Rounded in between, as the two steps one after the other are.
    made = _activated(gate, ACTIVATION).to(dtype).to(tl.float32) * up
    tl.store(output + row * SIZE + column, made.to(dtype), mask=inside)
