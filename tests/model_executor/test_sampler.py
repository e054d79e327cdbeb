from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from model_executor.sampler import SampleRows, sample
from tests.model_executor import sampling_reference as reference


def make_rows(count: int, **columns: object) -> SampleRows:
    """Rows that draw from the whole distribution, all alike but for seeds 0, 1, ..., and what `columns` set."""
    kinds = {"greedy": np.bool_, "temperature": np.float64, "top_p": np.float64, "min_p": np.float64}
    values = {"temperature": 1.0, "top_p": 1.0, "logprobs": -1, "seeds": np.arange(count), **columns}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for column in (field.name for field in fields(SampleRows)):
        size = 0 if column.startswith("banned") else count
        value: npt.NDArray[Any] = np.asarray(values.get(column, 0), dtype=kinds.get(column, np.int64))
        arrays[column] = np.broadcast_to(value, (size,)).copy() if value.ndim == 0 else value
    return SampleRows(**arrays)


def part(rows: SampleRows, picked: list[int]) -> SampleRows:
    """Some of the rows, with their bans."""
    names = [field.name for field in fields(SampleRows) if not field.name.startswith("banned")]
    mine = np.isin(rows.banned_rows, picked)
    renamed = np.array([picked.index(row) for row in rows.banned_rows[mine]], dtype=np.int64)
    columns = {name: getattr(rows, name)[picked] for name in names}
    return SampleRows(**columns, banned_rows=renamed, banned_ids=rows.banned_ids[mine])


def mixed_rows(count: int, seed: int) -> SampleRows:
    """Rows of every kind."""
    generator = np.random.default_rng(seed)
    banned = generator.integers(0, 50, (count, 2))
    return SampleRows(
        greedy=generator.random(count) < 0.3,
        temperature=generator.uniform(0.3, 1.5, count),
        top_k=generator.choice([0, -1, 1, 5, 40], count),
        top_p=generator.choice([0.0, 0.3, 0.9, 1.0], count),
        min_p=generator.choice([0.0, 0.1, 1.0], count),
        seeds=generator.integers(0, 2**63 - 1, count),
        positions=generator.integers(0, 1000, count),
        logprobs=generator.choice([-1, 0, 3, 20], count),
        banned_rows=np.repeat(np.arange(count), 2),
        banned_ids=banned.ravel(),
    )


def random_logits(count: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6))
def test_a_row_does_not_depend_on_its_neighbours(count: int, seed: int) -> None:
    logits, rows = random_logits(count, 300, seed), mixed_rows(count, seed)
    tokens, logprobs = sample(logits, rows, 290)
    entries = logprobs.to_wire(count) if logprobs is not None else [None] * count
    order = np.random.default_rng(seed).permutation(count).tolist()
    shuffled, _ = sample(logits[order], part(rows, order), 290)
    assert shuffled.tolist() == [tokens[row].item() for row in order]
    for row in range(count):
        token, alone = sample(logits[row : row + 1], part(rows, [row]), 290)
        assert token.item() == tokens[row].item()
        assert (alone.to_wire(1)[0] if alone is not None else None) == entries[row]


def test_a_broken_row_leaves_the_others_alone() -> None:
    logits, rows = random_logits(6, 100, 1), mixed_rows(6, 1)
    tokens, _ = sample(logits, rows, 100)
    broken = logits.clone()
    broken[2], broken[4, 5], broken[5, 7] = float("nan"), float("inf"), float("-inf")
    again, logprobs = sample(broken, replace(rows, logprobs=np.full(6, 20)), 100)
    assert [again[row].item() for row in (0, 1, 3)] == [tokens[row].item() for row in (0, 1, 3)]
    assert bool(((again >= 0) & (again < 100)).all())
    assert logprobs is not None
    assert bool(torch.isfinite(logprobs.chosen).all())
    assert bool(torch.isfinite(logprobs.top_values).all())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.5, 9, 0.9, 0.05),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    count, logits = 30_000, random_logits(1, 40, 5) / 2
    rows = make_rows(count, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, positions=17)
    tokens, _ = sample(logits.expand(count, -1), rows, 40)
    expected = np.array(reference.distribution(logits[0].tolist(), temperature, top_k, top_p, min_p)) * count
    observed = np.bincount(tokens.numpy(), minlength=40)
    assert observed[expected == 0].sum() == 0
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-4


def test_the_positions_of_one_request_are_independent_draws() -> None:
    count, logits = 20_000, torch.zeros(1, 8)
    tokens, _ = sample(logits.expand(count, -1), make_rows(count, seeds=99, positions=np.arange(count)), 8)
    pairs = np.bincount(tokens.numpy()[:-1] * 8 + tokens.numpy()[1:], minlength=64)
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_seed_and_position_repeat_a_draw() -> None:
    logits, rows = random_logits(1, 1000, 3), make_rows(1, seeds=2**63 - 1, positions=5)
    assert sample(logits, rows, 1000)[0].item() == sample(logits, rows, 1000)[0].item()
    draws = {sample(logits, replace(rows, positions=np.array([p])), 1000)[0].item() for p in range(50)}
    assert len(draws) > 10


def test_ids_from_vocab_size_on_are_never_sampled() -> None:
    logits = torch.zeros(200, 64)
    logits[:, 60:] = 50.0
    rows = make_rows(200, greedy=np.arange(200) % 2 == 0, logprobs=20)
    tokens, logprobs = sample(logits, rows, 60)
    assert int(tokens.max()) < 60
    assert logprobs is not None
    assert int(logprobs.top_ids.max()) < 60
    assert logprobs.chosen[0].item() == pytest.approx(-np.log(60))


def test_bans_change_the_choice_and_not_the_logprobs() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0]]).repeat(3, 1)
    rows = make_rows(3, greedy=True, logprobs=2)
    rows = replace(rows, banned_rows=np.array([1, 2, 2, 2]), banned_ids=np.array([0, 0, 1, 2]))
    tokens, logprobs = sample(logits, rows, 3)
    # The last row has nothing left to choose from.
    assert tokens.tolist() == [0, 1, 0]
    assert logprobs is not None
    first, second, _ = logprobs.to_wire(3)
    assert first is not None
    assert second is not None
    assert (first.top_ids, second.top_ids) == ([0, 1], [0, 1])
    assert first.top_logprobs == second.top_logprobs
    assert second.logprob == second.top_logprobs[1]


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    logits = random_logits(4, 500, 8)
    rows = make_rows(4, temperature=0.4, top_k=3, logprobs=np.array([20, -1, 0, 5]))
    tokens, logprobs = sample(logits, rows, 500)
    assert logprobs is not None
    entries = logprobs.to_wire(4)
    assert entries[1] is None
    for row, count in ((0, 20), (2, 0), (3, 5)):
        entry = entries[row]
        assert entry is not None
        expected = reference.log_softmax(logits[row].tolist())
        assert entry.top_ids == reference.ranking(logits[row].tolist())[:count]
        assert entry.top_logprobs == pytest.approx([expected[token] for token in entry.top_ids], abs=2e-6)
        assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)
        token = int(tokens[row])
        assert entry.logprob == pytest.approx(expected[token], abs=2e-6)
        if token in entry.top_ids:
            assert entry.logprob == entry.top_logprobs[entry.top_ids.index(token)]


def test_a_vocabulary_smaller_than_the_list() -> None:
    _, logprobs = sample(torch.zeros(1, 7), make_rows(1, logprobs=20), 5)
    assert logprobs is not None
    entry = logprobs.to_wire(1)[0]
    assert entry is not None
    assert entry.top_ids == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [1.1e-4, 1e-3, 1e-2])
def test_small_temperatures_are_nearly_greedy(temperature: float) -> None:
    logits = random_logits(64, 500, 4)
    tokens, _ = sample(logits, make_rows(64, temperature=temperature), 500)
    gap = logits.topk(2).values.diff()[:, 0].abs()
    clear = gap > 40 * temperature
    assert int(clear.sum()) > 30
    assert torch.equal(tokens[clear], logits.argmax(-1)[clear])
