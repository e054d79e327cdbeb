"""The norm in Triton's interpreter against torch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from model_executor.attention.dispatch import NORM, Chooser, KernelTable
from model_executor.layers.norm import NormProblem, RmsNorm, TorchNorm
from model_executor.layers.triton_norm import LARGEST_SIZE, SPEC, TritonNorm
from model_executor.models.spec import NormSpec
from tests.gpu.rounding import unlike
from tests.model_executor import interpreted  # noqa: F401 - before the kernels are made
from tests.model_executor.engine import BLOCK_SIZE, CPU

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def problem(size: int, dtype: torch.dtype = torch.float32, *, offset: bool = False) -> NormProblem:
    return NormProblem("cpu", dtype, size, offset, 1e-5)


def drawn(rows: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn((rows, size), generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 64), (3, 80), (7, 576), (2, 5120), (1, 16384)])
def test_equals_torch(rows: int, size: int, dtype: torch.dtype, offset: bool) -> None:
    here = problem(size, dtype, offset=offset)
    x, weight = drawn(rows, size, dtype, 0), drawn(1, size, dtype, 1)[0]
    assert unlike(TritonNorm(here).forward(x, weight), TorchNorm(here).forward(x, weight)) is None


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_before_it_equals_torch_and_stays(dtype: torch.dtype, offset: bool) -> None:
    here = problem(576, dtype, offset=offset)
    x, added, weight = drawn(5, 576, dtype, 0), drawn(5, 576, dtype, 1), drawn(1, 576, dtype, 2)[0]
    total = x + added
    before = added.clone()
    made = TritonNorm(here).forward(x, weight, added)
    assert torch.equal(x, total)
    assert torch.equal(added, before)
    assert unlike(made, TorchNorm(here).forward(total, weight)) is None


def test_rows_of_something_wider() -> None:
    """The latent of MLA is such a slice; so is the sum's second part, if a kernel makes it so."""
    wide, weight = drawn(4, 100, torch.float32, 0), drawn(1, 64, torch.float32, 1)[0]
    here = problem(64)
    expected = TorchNorm(here).forward(wide[:, 3:67], weight)
    assert unlike(TritonNorm(here).forward(wide[:, 3:67], weight), expected) is None
    x = torch.zeros(4, 64)
    assert unlike(TritonNorm(here).forward(x, weight, wide[:, 3:67]), expected) is None
    assert torch.equal(x, wide[:, 3:67])


def test_leading_axes_stay() -> None:
    x, weight = drawn(6, 32, torch.float32, 0), drawn(1, 32, torch.float32, 1)[0]
    made = TritonNorm(problem(32)).forward(x.view(2, 3, 32), weight)
    assert made.shape == (2, 3, 32)
    assert unlike(made.view(6, 32), TorchNorm(problem(32)).forward(x, weight)) is None
    assert TritonNorm(problem(32)).forward(x[:0], weight).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, number: float) -> None:
    here = problem(40, dtype)
    x, weight = drawn(3, 40, dtype, 0), drawn(1, 40, dtype, 1)[0]
    x[1, 7] = number
    with np.errstate(invalid="ignore"):
        made = TritonNorm(here).forward(x, weight)
    assert unlike(made, TorchNorm(here).forward(x, weight)) is None
    assert made[1].isnan().any()
    assert made[::2].isfinite().all()


def test_zeros_and_large_numbers() -> None:
    """The mean of squares that float16 does not hold."""
    here = problem(64, torch.float16)
    x, weight = drawn(2, 64, torch.float16, 0), torch.ones(64, dtype=torch.float16)
    x[0] *= 5000
    x[1] = 0
    made = TritonNorm(here).forward(x, weight)
    assert unlike(made, TorchNorm(here).forward(x, weight)) is None
    assert made.isfinite().all()


def test_a_layer_gives_the_sum_to_the_kernel() -> None:
    layer = RmsNorm(48, NormSpec(1e-5), torch.float32, CPU, TritonNorm(problem(48)))
    plain = RmsNorm(48, NormSpec(1e-5), torch.float32, CPU)
    for each in (layer, plain):
        each.weight.copy_(drawn(1, 48, torch.float32, 2)[0])
    x, added = drawn(3, 48, torch.float32, 0), drawn(3, 48, torch.float32, 1)
    theirs = x.clone()
    assert unlike(layer(x, added), plain(theirs, added)) is None
    assert torch.equal(x, theirs)


def test_the_choice_and_its_reasons() -> None:
    on_gpu = dataclasses.replace(problem(4096, torch.bfloat16), device="cuda")
    assert NORM[0] is SPEC
    assert SPEC.reject(on_gpu) == ()
    assert SPEC.reject(problem(4096)) == ("device cpu: runs on cuda",)
    wide = dataclasses.replace(on_gpu, size=LARGEST_SIZE + 1)
    assert SPEC.reject(wide) == ("size 16385: takes up to 16384",)
    assert "float64" in SPEC.reject(dataclasses.replace(on_gpu, dtype=torch.float64))[0]
    table = KernelTable()
    assert isinstance(Chooser(table, torch.float32, CPU, BLOCK_SIZE).norm(NormSpec(1e-5), 64).kernel, TorchNorm)
    assert table.explain()[0].candidates[0].reasons == ["device cpu: runs on cuda"]
