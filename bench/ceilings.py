"""What the machine can do at most, measured: bytes a second to and from memory, operations a second in products."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import torch
from msgspec import Struct

# Larger than any cache.
COPY_BYTES: Final = 512 * 2**20
SQUARE: Final = 2048
REPEATS: Final = 5


class Ceilings(Struct, frozen=True):
    """The limits of this machine with the threads that torch has now.

    Attributes:
        bytes_per_s: read and written by a copy of a large tensor, or read by its sum, whichever is more: a copy also
            reads what it overwrites.
        operations_per_s: multiplications and additions of a large matrix product, by the numbers that it multiplies.
        threads: that were used.
    """

    bytes_per_s: float
    operations_per_s: Mapping[str, float]
    threads: int


def measure_ceilings() -> Ceilings:
    """Measure now, for a few seconds; the best of several runs counts, as a limit has to."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    moved = max(2 * COPY_BYTES / best(lambda: target.copy_(source)), COPY_BYTES / best(source.sum))
    rates = {"float32": _product(torch.float32), "int8": _int_product()}
    return Ceilings(moved, rates, torch.get_num_threads())


def best(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest call, after one that does not count."""
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _product(dtype: torch.dtype) -> float:
    one = torch.ones(SQUARE, SQUARE, dtype=dtype)
    return float(2 * SQUARE**3 / best(lambda: one @ one))


def _int_product() -> float:
    one = torch.ones(SQUARE, SQUARE, dtype=torch.int8)
    return float(2 * SQUARE**3 / best(lambda: torch._int_mm(one, one)))
