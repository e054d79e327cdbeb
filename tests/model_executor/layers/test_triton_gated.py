"""activation(gate) * up in Triton's interpreter against torch."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from model_executor.attention.dispatch import LINEAR, Chooser, KernelTable
from model_executor.layers.activation import ACTIVATIONS
from model_executor.layers.linear import Linear, LinearProblem, gated
from model_executor.layers.triton_gated import SPEC, GatedLinear, TritonGate
from model_executor.models.spec import Activation
from tests.gpu.rounding import unlike
from tests.model_executor import interpreted  # noqa: F401 - before the kernels are made
from tests.model_executor.engine import BLOCK_SIZE, CPU

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NOISE = 1e-5
ALL: tuple[Activation, ...] = get_args(Activation)


def problem(size: int, dtype: torch.dtype, gate: Activation | None = "silu", *, bias: bool = False) -> LinearProblem:
    return LinearProblem("cpu", dtype, 24, 2 * size, bias, gate)


def drawn(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn((rows, size), generator=torch.Generator().manual_seed(rows)) * 4).to(dtype)


def run(here: LinearProblem, halves: Tensor) -> Tensor:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return TritonGate(here)(halves)


@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 1536), (3, 100), (2, 2500)])
def test_equals_torch(rows: int, size: int, dtype: torch.dtype, activation: Activation) -> None:
    halves = drawn(rows, 2 * size, dtype)
    made, theirs = run(problem(size, dtype, activation), halves), gated(halves, activation)
    if activation in ("silu", "relu"):
        assert unlike(made, theirs) is None
    else:
        # Below zero 1 is added to what is close to -1: what is left has few digits in float32.
        torch.testing.assert_close(made, theirs, rtol=2 * torch.finfo(dtype).eps, atol=NOISE)


@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_the_line(activation: Activation, dtype: torch.dtype) -> None:
    """Numbers whose exponential overflows, and those that are not finite, against the activation in float64."""
    largest = torch.finfo(dtype).max
    gate = torch.tensor([0.0, 1e-6, -1e-6, 90.0, -90.0, largest, -largest, float("inf"), float("-inf"), float("nan")])
    gate = gate.to(dtype)
    halves = torch.cat((gate, torch.full_like(gate, 0.5)))[None]
    made = run(problem(len(gate), dtype, activation), halves)
    expected = ACTIVATIONS[activation](gate.double()).to(dtype) * 0.5
    assert unlike(made[0], expected) is None


def test_rows_of_something_wider_and_none() -> None:
    wide = drawn(4, 100, torch.float32)
    gate = TritonGate(problem(40, torch.float32))
    assert unlike(gate(wide[:, 9:89]), gated(wide[:, 9:89], "silu")) is None
    assert gate(wide[:0, :80]).shape == (0, 40)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_gates_its_product_and_keeps_its_weight_once(bias: bool) -> None:
    here = problem(36, torch.float32, bias=bias)
    plain, ours = (
        Linear(24, 72, bias=bias, dtype=torch.float32, device=CPU, gate="silu", kernel=kernel)
        for kernel in (None, GatedLinear(here))
    )
    for each in (plain, ours):
        for seed, parameter in enumerate(each.parameters()):
            parameter.data.normal_(generator=torch.Generator().manual_seed(seed))
    address = ours.weight.data_ptr()
    ours.pack()
    assert ours.product is not None
    assert ours.product.packed.data_ptr() == address
    assert ours.product.stored_as == "float32"
    assert [name for name, _ in ours.named_parameters()] == []
    x = drawn(5, 24, torch.float32)
    assert unlike(ours(x), plain(x)) is None


def test_the_choice_and_its_reasons() -> None:
    here = problem(64, torch.bfloat16)
    on_gpu = dataclasses.replace(here, device="cuda")
    assert LINEAR[0] is SPEC
    assert SPEC.reject(on_gpu) == ()
    assert SPEC.reject(here) == ("device cpu: runs on cuda",)
    assert SPEC.reject(dataclasses.replace(on_gpu, gate=None)) == ("no gate: nothing follows the product",)
    assert SPEC.reject(dataclasses.replace(on_gpu, int8=True)) == ("int8: computes in the dtype only",)
    assert "float64" in SPEC.reject(dataclasses.replace(on_gpu, dtype=torch.float64))[0]
    table = KernelTable()
    made = Chooser(table, torch.bfloat16, CPU, BLOCK_SIZE).linear(24, 128, bias=False, gate="silu")
    made.pack()
    assert made.product is None
    assert table.explain()[0].candidates[0].reasons == ["device cpu: runs on cuda"]
