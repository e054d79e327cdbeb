from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from model_executor.rng import MULTIPLIER_0, MULTIPLIER_1, WEYL_0, WEYL_1, WORD, philox, uniform

# Counter, key and output published with the generator (Random123, kat_vectors, philox4x32 with 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORDS = st.integers(0, WORD)


def scalar_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The generator as the paper writes it, on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & WORD, (first >> 32) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert scalar_philox(counter, key) == words
    assert tuple(philox(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])[:, 0].tolist()) == words


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.tuples(*[WORDS] * 4), st.tuples(*[WORDS] * 2)), min_size=1, max_size=5))
def test_rows_are_those_of_the_scalar_generator(rows: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    counters, keys = (torch.tensor(column).T for column in zip(*rows, strict=True))
    words = philox(counters, keys)
    assert [tuple(word) for word in words.T.tolist()] == [scalar_philox(*row) for row in rows]


def test_a_draw_does_not_depend_on_its_row_or_neighbours() -> None:
    seeds = torch.tensor([7, 2**63 - 1, 0, 7, 123456789012345])
    positions = torch.tensor([0, 5, 131071, 1, 2])
    together = uniform(seeds, positions)
    for row in range(5):
        assert uniform(seeds[row : row + 1], positions[row : row + 1]).item() == together[row].item()
    assert uniform(seeds.flip(0), positions.flip(0)).flip(0).tolist() == together.tolist()
    assert len(set(together.tolist())) == 5


def test_seed_and_position_each_matter() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    base = uniform(zero, zero).item()
    assert uniform(zero + 2**32, zero).item() != base
    assert uniform(zero + 1, zero).item() != base
    assert uniform(zero, zero + 1).item() != base


def test_range_leaves_room_below_one() -> None:
    values = uniform(torch.arange(20000), torch.zeros(20000, dtype=torch.int64))
    assert float(values.min()) >= 0.0
    largest = 1.0 - 2.0**-52
    assert float(values.max()) <= largest
    for total in (0.3, 1.0, 1.9999999, math.pi):
        assert largest * total < total


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_numbers_are_uniform_and_uncorrelated(axis: str) -> None:
    count = 50_000
    walk, still = torch.arange(count), torch.full((count,), 3)
    values = (uniform(walk, still) if axis == "seeds" else uniform(still, walk)).numpy()
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    observed, _ = np.histogram(values, bins=200, range=(0, 1))
    assert stats.chisquare(observed).pvalue > 1e-4
    pairs, _, _ = np.histogram2d(values[:-1], values[1:], bins=20, range=((0, 1), (0, 1)))
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-4
    low_bits = (values * 2.0**52).astype(np.int64) & 1
    assert stats.binomtest(int(low_bits.sum()), count).pvalue > 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_same_numbers() -> None:
    seeds, positions = torch.arange(1000) * 2**40, torch.arange(1000)
    assert torch.equal(uniform(seeds.cuda(), positions.cuda()).cpu(), uniform(seeds, positions))
