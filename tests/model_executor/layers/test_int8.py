from __future__ import annotations

import pytest
import torch

from model_executor.layers.int8 import INT8_SPEC, TURNED, group_of, hadamard, rotate, shrink
from model_executor.layers.linear import LinearProblem


def problem(inputs: int = 128, *, int8: bool = True) -> LinearProblem:
    return LinearProblem("cpu", torch.float32, inputs, 48, bias=True, gate=None, int8=int8)


def test_the_rotation_turns_back() -> None:
    matrix = hadamard(TURNED)
    assert torch.equal(matrix @ matrix, TURNED * torch.eye(TURNED))
    x = torch.randn(3, 2 * TURNED, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(rotate(x).flatten(1)).flatten(1), x)


@pytest.mark.parametrize(("inputs", "group"), [(64, 64), (576, 192), (896, 128), (1536, 256), (64 * 37, 64)])
def test_groups_are_as_large_as_they_may(inputs: int, group: int) -> None:
    assert group_of(inputs) == group


def test_whole_numbers_by_hand() -> None:
    whole, scale = shrink(torch.tensor([[-254.0, 1.1, 0.9, 127.0], [0.0, 0.0, 0.0, 0.0]]), (-1,))
    assert whole.tolist() == [[-127.0, 1.0, 0.0, 64.0], [0.0] * 4]
    assert scale.flatten().tolist() == [2.0, 0.0]


@pytest.mark.parametrize("outlier", [1.0, 100.0])
def test_one_huge_channel_does_not_cost_the_others(outlier: float) -> None:
    """Steps of 1/127 of a group's largest on both sides: well below two in a hundred of the result."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(128, 48, generator=generator), torch.randn(48, generator=generator)
    x = torch.randn(20, 128, generator=generator)
    x[:, 5] *= outlier
    product = INT8_SPEC.factory(problem()).pack(weight, bias)
    assert product is not None
    exact = x @ weight + bias
    assert (product(x) - exact).norm() < 0.02 * exact.norm()


def test_no_rows_are_no_rows() -> None:
    product = INT8_SPEC.factory(problem()).pack(torch.randn(128, 48), torch.zeros(48))
    assert product is not None
    assert product(torch.empty(0, 128)).shape == (0, 48)


def test_all_that_is_kept_shows_in_its_bytes() -> None:
    """A weight of twice the size has the same whole numbers and other scales."""
    weight, bias = torch.randn(128, 48, generator=torch.Generator().manual_seed(0)), torch.zeros(48)
    one, two = (INT8_SPEC.factory(problem()).pack(each, bias) for each in (weight, 2 * weight))
    assert one is not None
    assert two is not None
    assert one.packed.numel() == 128 * 48 + 4 * 48
    assert torch.equal(one.packed[: 128 * 48], two.packed[: 128 * 48])
    assert not torch.equal(one.packed, two.packed)


def test_refusals_name_the_reason() -> None:
    assert INT8_SPEC.reject(problem()) == ()
    assert INT8_SPEC.reject(problem(96)) == ("inputs 96: int8 takes multiples of 64",)
    assert INT8_SPEC.reject(problem(int8=False)) == ("in float32: see torch_matmul",)
