from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_executor import distribution
from model_executor.batch import Ints
from model_executor.distribution import Floats
from tests.model_executor import sampling_reference as reference

# Sixteenths, so that ties happen and every value is exact in float32.
VALUES = st.integers(-160, 160).map(lambda n: n / 16)
ROWS = st.integers(1, 40).flatmap(
    lambda width: st.lists(st.lists(VALUES, min_size=width, max_size=width), min_size=1, max_size=4)
)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float64)


def kept(logits: Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row > -math.inf)[:, 0].tolist()) for row in logits]


def test_softmax_by_hand() -> None:
    result = distribution.softmax(torch.tensor([[0.0, math.log(3.0)], [1e30, 1e30]]))
    assert result.tolist() == [pytest.approx([0.25, 0.75]), [0.5, 0.5]]


def test_steps_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert kept(distribution.top_k(logits, ints(2))) == [{0, 1}]
    assert kept(distribution.top_p(logits, floats(0.7))) == [{0, 1}]
    assert kept(distribution.top_p(logits, floats(0.8))) == [{0, 1, 2}]
    assert kept(distribution.min_p(logits, floats(0.29))) == [{0, 1, 2}]
    assert kept(distribution.min_p(logits, floats(0.31))) == [{0, 1}]
    assert distribution.temperature(logits, floats(2.0))[0, 1].item() == pytest.approx(math.log(0.5) / 2)


def test_choose_by_hand() -> None:
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).repeat(6, 1)
    uniform = doubles(0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-52)
    assert distribution.choose(probabilities, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert distribution.greedy(logits).tolist() == [1]
    assert kept(distribution.top_k(logits, ints(2))) == [{1, 2}]
    assert kept(distribution.top_p(logits, floats(0.3))) == [{1, 2}]
    assert distribution.largest(logits, 4)[1].tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("k", [0, -1, 5, 6, 2**31 - 1])
def test_top_k_that_keeps_all(k: int) -> None:
    logits = torch.randn(1, 5)
    assert torch.equal(distribution.top_k(logits, ints(k)), logits)


def test_top_p_of_zero_keeps_the_likeliest() -> None:
    assert kept(distribution.top_p(torch.tensor([[0.0, 3.0, 3.0]]), floats(0.0))) == [{1}]


def test_min_p_of_one_keeps_all_of_the_likeliest() -> None:
    assert kept(distribution.min_p(torch.tensor([[0.0, 3.0, 3.0]]), floats(1.0))) == [{1, 2}]


def test_temperature_does_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38]])
    assert distribution.softmax(distribution.temperature(logits, floats(1.01e-4))).tolist() == [[0.5, 0.0, 0.5]]


def test_finite() -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[1.0, 2.0], [nan, 1.0], [-inf, -inf], [nan, nan], [inf, 0.0], [-inf, 5.0]])
    largest = torch.finfo(torch.float32).max
    clean = [[1.0, 2.0], [-inf, 1.0], [0.0, 0.0], [0.0, 0.0], [largest, 0.0], [-inf, 5.0]]
    assert distribution.finite(logits).tolist() == clean
    assert torch.equal(distribution.finite(logits[:1]), logits[:1])
    first = [1, 1, 0, 0, 0, 1]
    assert distribution.likeliest(logits).tolist() == distribution.greedy(distribution.finite(logits)).tolist() == first
    # What a device takes the largest of.
    assert distribution.greedy(distribution._without_nan(logits)).tolist() == first


@settings(max_examples=150, deadline=None)
@given(ROWS, st.data())
def test_top_k_against_the_reference(rows: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.lists(st.integers(-1, 45), min_size=len(rows), max_size=len(rows)))
    result = distribution.top_k(torch.tensor(rows), ints(*k))
    assert kept(result) == [reference.top_k(row, count) for row, count in zip(rows, k, strict=True)]


def near_border(row: list[float], p: float) -> bool:
    """Whether float32 could decide otherwise than exact arithmetic."""
    return 0 < p < 1 and reference.top_p(row, p - 1e-5) != reference.top_p(row, p + 1e-5)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.data())
def test_top_p_against_the_reference(rows: list[list[float]], data: st.DataObject) -> None:
    p = data.draw(st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=len(rows), max_size=len(rows)))
    assume(not any(near_border(row, value) for row, value in zip(rows, p, strict=True)))
    result = distribution.top_p(torch.tensor(rows), floats(*p))
    assert kept(result) == [reference.top_p(row, value) for row, value in zip(rows, p, strict=True)]


@settings(max_examples=150, deadline=None)
@given(ROWS, st.data())
def test_min_p_against_the_reference(rows: list[list[float]], data: st.DataObject) -> None:
    ratio = data.draw(st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=len(rows), max_size=len(rows)))
    for row, value in zip(rows, ratio, strict=True):
        assume(0 in (value, 1 - value) or reference.min_p(row, value * 0.9999) == reference.min_p(row, value * 1.0001))
    result = distribution.min_p(torch.tensor(rows), floats(*ratio))
    assert kept(result) == [reference.min_p(row, value) for row, value in zip(rows, ratio, strict=True)]


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_softmax_and_greedy_against_the_reference(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    assert distribution.greedy(logits).tolist() == [reference.greedy(row) for row in rows]
    for got, row in zip(distribution.softmax(logits).tolist(), rows, strict=True):
        assert got == pytest.approx(reference.softmax(row), rel=1e-5, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.data())
def test_largest_against_the_reference(rows: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rows[0])))
    values, ids = distribution.largest(torch.tensor(rows), k)
    assert ids.tolist() == [reference.ranking(row)[:k] for row in rows]
    assert values.tolist() == [sorted(row, reverse=True)[:k] for row in rows]
    # What a device takes for them.
    assert distribution._first_ids(torch.tensor(rows), values[:, -1:], k).tolist() == ids.sort().values.tolist()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=400).filter(any),
    st.floats(0, 1, exclude_max=True).map(lambda u: math.floor(u * 2**52) / 2**52),
)
def test_choose_against_the_reference(weights: list[int], uniform: float) -> None:
    # Integer weights: all sums are exact, so no border is blurred.
    got = distribution.choose(torch.tensor([weights], dtype=torch.float32), doubles(uniform))
    assert got.item() == reference.choose(weights, uniform)


@pytest.mark.parametrize("width", [1, 127, 128, 129, 5000])
def test_choose_finds_every_id(width: int) -> None:
    ids = torch.tensor(sorted({0, width // 2, width - 1}))
    probabilities = torch.zeros(len(ids), width).scatter_(1, ids[:, None], 0.125)
    for uniform in (0.0, 0.5, 1 - 2.0**-52):
        assert torch.equal(distribution.choose(probabilities, doubles(uniform).expand(len(ids))), ids)


def test_choose_never_draws_an_id_without_mass() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(3000, 700, generator=generator)
    probabilities[torch.rand(3000, 700, generator=generator) < 0.7] = 0.0
    probabilities[:, 300] += 1e-6
    for uniform in (0.0, 0.3, 0.999999, 1 - 2.0**-52):
        drawn = distribution.choose(probabilities, doubles(uniform).expand(3000))
        assert float(probabilities.gather(1, drawn[:, None]).min()) > 0


def test_top_p_looks_beyond_its_first_candidates() -> None:
    logits = torch.zeros(3, 6000)
    logits[1, 4000] = 20.0
    assert [len(row) for row in kept(distribution.top_p(logits, floats(0.5, 0.5, 1.0)))] == [3000, 1, 6000]


@settings(max_examples=150, deadline=None)
@given(ROWS, st.data())
def test_few_candidates_give_the_same_without_reading_anything(rows: list[list[float]], data: st.DataObject) -> None:
    """What a device does: no choice is made by numbers that the host has read."""
    k = data.draw(st.lists(st.integers(1, len(rows[0])), min_size=len(rows), max_size=len(rows)))
    p = floats(*data.draw(st.lists(st.floats(0, 1), min_size=len(rows), max_size=len(rows))))
    logits = torch.tensor(rows)
    few = distribution.top_k(logits, ints(*k))
    assert torch.equal(distribution.top_p(few, p, max(k)), distribution.top_p(few, p))
    wanted = torch.tensor(k)[:, None]
    border = logits.sort(descending=True).values.gather(-1, wanted - 1)
    alone = distribution._with_first_equals(logits, border, wanted)
    assert [set(row.nonzero()[:, 0].tolist()) for row in alone] == [
        set(sorted(range(len(row)), key=lambda place: -row[place])[:count]) for row, count in zip(rows, k, strict=True)
    ]


STEPS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("top_k", lambda x: distribution.top_k(x, ints(-2))),
    ("top_k", lambda x: distribution.top_k(x, ints(1, 1))),
    ("top_p", lambda x: distribution.top_p(x, floats(1.5))),
    ("top_p", lambda x: distribution.top_p(x, floats(math.nan))),
    ("min_p", lambda x: distribution.min_p(x, floats(-0.1))),
    ("temperature", lambda x: distribution.temperature(x, floats(0.0))),
    ("uniform", lambda x: distribution.choose(x, torch.zeros(1))),
    ("logits", lambda x: distribution.softmax(x.double())),
    ("logits", lambda x: distribution.greedy(x[0])),
    ("logits", lambda x: distribution.finite(x[:, :0])),
]


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_what_is_out_of_range_raises(name: str, step: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=name):
        step(torch.zeros(1, 3))


def test_arguments_stay_as_they_are() -> None:
    logits = torch.randn(2, 9)
    before = logits.clone()
    distribution.top_k(logits, ints(2, 0))
    distribution.top_p(logits, floats(0.5, 1.0))
    distribution.min_p(logits, floats(0.5, 0.0))
    distribution.temperature(logits, floats(0.5, 2.0))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [1, 100, 128, 384, 1000, 1024])
def test_greedy_takes_the_first_of_equals_wherever_they_lie(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    # Few values: every row has many equals, in one chunk and in several.
    logits = torch.randint(-3, 3, (64, size + 7), generator=generator).float()[:, :size]
    firsts = [row.index(max(row)) for row in logits.tolist()]
    assert distribution.greedy(logits).tolist() == firsts
