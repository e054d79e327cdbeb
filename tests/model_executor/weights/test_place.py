from __future__ import annotations

import pytest
import torch

from model_executor.weights.place import place


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_go_to_their_place_on_the_output_axis(transposed: bool) -> None:
    rows = torch.arange(6.0).view(3, 2)
    target = torch.zeros((2, 5) if transposed else (5, 2))
    assert place(target, rows, 1, transposed=transposed)
    laid = target.t() if transposed else target
    assert torch.equal(laid[1:4], rows)
    assert not bool(laid[[0, 4]].any())


def test_experts_lie_one_after_the_other() -> None:
    """Three experts of two inputs and four outputs, each made of two tensors of two rows, read a row at a time."""
    rows = torch.arange(1.0, 25.0).view(12, 2)
    target = torch.zeros(3, 2, 4)
    for first in range(12):
        assert place(target, rows[first : first + 1], first, transposed=True)
    for expert in range(3):
        assert torch.equal(target[expert], rows[4 * expert : 4 * expert + 4].t())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_what_is_not_finite_in_the_target_is_told(value: float) -> None:
    target = torch.zeros(2, 1, 2, dtype=torch.float16)
    assert not place(target, torch.tensor([[value], [1.0]]), 2, transposed=True)
    assert place(target, torch.tensor([[2.0], [1.0]]), 2, transposed=True)


def test_rows_are_rounded_before_they_are_kept_wide() -> None:
    rows = torch.tensor([[1 + 2.0**-9], [70000.0]])
    target = torch.zeros(2, 1)
    assert place(target, rows, 0, transposed=False, rounded=torch.bfloat16)
    assert target.tolist() == [[1.0], [70144.0]]
    assert not place(target, rows, 0, transposed=False, rounded=torch.float16)
