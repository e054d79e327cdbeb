"""Packed products against torch, and to the bit against themselves in other batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_executor.layers.int8 import INT8_SPEC
from model_executor.layers.linear import LinearProblem, Product, gated
from model_executor.models.spec import Activation
from model_executor.native.library import Native
from model_executor.native.linear import PackedProduct, packed_linear
from tests.model_executor.native.builds import each_build

# Numbers of rows on both sides of every border: tiles, blocks of equal size, many rows.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 24, 31, 35, 36, 37, 100, 193)
# inputs, outputs, gate, bias: whole and cut panels, one and several stretches, fewer inputs than a vector.
SHAPES: list[tuple[int, int, Activation | None, bool]] = [
    (64, 32, None, False),
    (576, 96, None, True),
    (300, 77, None, True),
    (7, 5, None, False),
    (1536, 64, None, False),
    (64, 128, "silu", False),
    (128, 80, "gelu_tanh", True),
    (20, 6, "silu", True),
]

pytestmark = pytest.mark.parametrize("native", each_build())


def problem(
    inputs: int, outputs: int, gate: Activation | None = None, bias: bool = False, int8: bool = False
) -> LinearProblem:
    return LinearProblem("cpu", torch.float32, inputs, outputs, bias, gate, int8)


def draw(problem: LinearProblem, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(problem.inputs, problem.outputs, generator=generator).to(dtype).float()
    return weight, torch.randn(problem.outputs, generator=generator) if problem.bias else None


def pack(native: Native, problem: LinearProblem, weight: Tensor, bias: Tensor | None) -> Product:
    product = packed_linear(native).factory(problem).pack(weight, bias)
    assert product is not None
    return product


def inputs(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_torch(native: Native, shape: tuple[int, int, Activation | None, bool], dtype: torch.dtype) -> None:
    wanted = problem(*shape)
    weight, bias = draw(wanted, dtype)
    product = pack(native, wanted, weight, bias)
    assert product.stored_as == str(dtype).removeprefix("torch.")
    for rows in ROWS:
        x = inputs(rows, wanted.inputs)
        exact = x.double() @ weight.double()
        exact = exact if bias is None else exact + bias
        exact = exact if wanted.gate is None else gated(exact, wanted.gate)
        # A sum of K products of numbers of size one rounds K times.
        torch.testing.assert_close(product(x), exact.float(), rtol=1e-5, atol=1e-5 * wanted.inputs**0.5)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] % 64 == 0], ids=str)
def test_a_row_is_the_same_bits_in_every_batch(
    native: Native, shape: tuple[int, int, Activation | None, bool], int8: bool
) -> None:
    wanted = problem(*shape, int8=int8)
    product = pack(native, wanted, *draw(wanted, torch.bfloat16))
    x = inputs(max(ROWS), wanted.inputs)
    alone = torch.cat([product(row) for row in torch.split(x, 1)])
    for rows in ROWS:
        assert torch.equal(product(x[:rows]), alone[:rows])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] % 64 == 0], ids=str)
def test_int8_equals_its_reference(native: Native, shape: tuple[int, int, Activation | None, bool]) -> None:
    """A number on the border of two steps may fall to either side: that is one step of 127 of one input of many."""
    wanted = problem(*shape, int8=True)
    weight, bias = draw(wanted)
    product = pack(native, wanted, weight, bias)
    reference = INT8_SPEC.factory(wanted).pack(weight, bias)
    assert reference is not None
    assert product.stored_as == "int8"
    for rows in ROWS:
        x = inputs(rows, wanted.inputs)
        x[:, 3] *= 50
        theirs = reference(x)
        assert (product(x) - theirs).norm() <= 2e-3 * theirs.norm()


def test_int8_of_zeros_is_zero(native: Native) -> None:
    wanted = problem(64, 40, int8=True)
    weight, bias = draw(wanted)
    assert not pack(native, wanted, weight, bias)(torch.zeros(3, 64)).any()
    assert not pack(native, wanted, torch.zeros_like(weight), bias)(inputs(3, 64)).any()


def test_int8_sums_are_exact_at_the_largest_bytes(native: Native) -> None:
    """One number of 64, turned, is 64 numbers of that size, so every byte is 127 or -127: the sum of two products of
    such bytes, one of them plus 128, is more than 16 bits hold."""
    wanted = problem(256, 40, int8=True)
    x, weight = torch.zeros(5, 256), torch.zeros(256, 40)
    x[:, ::64] = torch.tensor([1.0, -1.0, 2.0, -3.0, 5.0])[:, None]
    weight[::64] = torch.where(torch.arange(40) % 3 == 0, -1.0, 1.0)
    torch.testing.assert_close(pack(native, wanted, weight, None)(x), x @ weight, rtol=1e-6, atol=0.0)


def test_strides_of_weight_and_input(native: Native) -> None:
    wanted = problem(48, 40)
    weight, _ = draw(wanted)
    x = inputs(5, 96)
    expected = pack(native, wanted, weight, None)(x[:, :48].contiguous())
    turned = pack(native, wanted, weight.t().contiguous().t(), None)
    assert torch.equal(turned(x[:, :48]), expected)
    assert torch.equal(turned(x[:, :48].t().contiguous().t()), expected)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (0.0, "bfloat16"),
        (1.0 + 2**-7, "bfloat16"),
        (2.0**-24, "bfloat16"),
        (1.0 + 2**-10, "float16"),
        (65504.0, "float16"),
        (-(2.0**-14) * (1 + 2**-10), "float16"),
        (1.0 + 2**-11, "float32"),
        (1e9 + 64, "float32"),
    ],
)
def test_the_narrowest_kind_that_loses_nothing(native: Native, value: float, stored: str) -> None:
    weight = torch.full((16, 32), value)
    product = PackedProduct(native, problem(16, 32), weight, None)
    assert product.stored_as == stored
    assert torch.equal(product(torch.eye(16)), weight)


def test_no_rows_are_no_rows(native: Native) -> None:
    assert pack(native, problem(16, 32), *draw(problem(16, 32)))(torch.empty(0, 16)).shape == (0, 32)


def test_refusals_name_the_reason(native: Native) -> None:
    spec = packed_linear(native)
    assert spec.reject(problem(64, 32, "relu")) == ("gate relu: takes silu and gelu_tanh",)
    assert spec.reject(problem(96, 32, int8=True)) == ("inputs 96: int8 takes multiples of 64",)
    assert spec.reject(problem(96, 32)) == ()
