"""Zeroed memory in huge pages, where the system gives them on request.

A step reads all weights and much of the KV cache. In pages of 4 KiB every one of them costs a walk through the page
tables, which in a virtual machine are two deep, and ends the processor's prefetch.
"""

from __future__ import annotations

import mmap
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE: Final = 2 * 2**20
CHUNK: Final = 64 * 2**20
# Of what is taken from a chunk: a cache line.
ALIGNMENT: Final = 64


def zeros(nbytes: int) -> Tensor:
    """uint8 [nbytes] of its own; a page is touched by the first write to it only."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return whole[first : first + nbytes]


class Arena:
    """Small pieces side by side in common huge pages; they are given back when the last one of a chunk is gone."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of zeros, aligned to a cache line."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self._rest.shape[0]:
            self._rest = zeros(max(size, CHUNK))
        piece, self._rest = self._rest[:nbytes], self._rest[size:]
        return piece
