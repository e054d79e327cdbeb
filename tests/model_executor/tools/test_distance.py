"""The rule of the parity: what keeps it and what does not."""

from __future__ import annotations

import math

import pytest
import torch

from model_executor.tools.distance import FACTOR, boundaries, distance, first_place, lead

EPS = torch.finfo(torch.float32).eps


def test_distances() -> None:
    truth = torch.tensor([[3.0, 4.0]])
    assert distance(truth, truth).relative == 0
    assert distance(truth, truth).cosine == pytest.approx(1)
    off = distance(torch.tensor([[3.0, 4.5]]), truth)
    assert off.relative == pytest.approx(0.1)
    assert off.largest == pytest.approx(0.5)
    assert off.cosine == pytest.approx((9 + 18) / (5 * math.sqrt(9 + 4.5**2)))
    assert distance(torch.tensor([[math.nan, 0]]), truth).relative == math.inf
    assert distance(torch.zeros(1, 2), torch.zeros(1, 2)).cosine == 1
    assert distance(torch.ones(1, 2), torch.zeros(1, 2)).relative == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(("factor", "within"), [(0.5, True), (FACTOR * 0.99, True), (FACTOR * 1.01, False)])
def test_the_noise_decides(factor: float, within: bool) -> None:
    truth = {"a": torch.ones(4, 4)}
    noisy = {"a": torch.ones(4, 4) + 1e-3}
    (row,) = boundaries({"a": torch.ones(4, 4) + factor * 1e-3}, noisy, truth, torch.float32)
    assert row.within is within


def test_one_large_error_is_outside_though_the_norm_is_not() -> None:
    truth, noisy, run = (torch.ones(1000, 10) for _ in range(3))
    noisy += 1e-3
    run[0, 0] += FACTOR * 1.5e-3
    (row,) = boundaries({"a": run}, {"a": noisy}, {"a": truth}, torch.float32)
    assert row.run.relative < row.noise.relative
    assert not row.within


def test_without_noise_one_unit_of_rounding_counts() -> None:
    exact = {"a": torch.ones(4, 4)}
    for error, within in ((FACTOR * EPS * 0.5, True), (FACTOR * EPS * 2, False)):
        (row,) = boundaries({"a": torch.ones(4, 4).double() + error}, exact, exact, torch.float32)
        assert row.within is within


def test_the_first_place_outside_the_noise_at_a_position() -> None:
    truth = {"a": torch.ones(3, 4), "b": torch.ones(3, 4)}
    noisy = {place: values + 1e-3 for place, values in truth.items()}
    run = {place: values.clone() for place, values in noisy.items()}
    run["b"][1] += 1
    rows = boundaries(run, noisy, truth, torch.float32)
    assert [first_place(run, truth, rows, position, torch.float32) for position in range(3)] == ["", "b", ""]


def test_lead() -> None:
    assert lead(torch.tensor([1.0, 5.0, 4.5])) == pytest.approx(0.5)
