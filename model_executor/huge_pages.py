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


class Arena:
    """Memory for pieces side by side in common huge pages; the first write to a page touches it. A chunk is given back
    when the last piece in it is gone.

    Args:
        chunk: bytes asked of the system at once, if a piece does not need more.
    """

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._memory = mmap.mmap(-1, 1)
        self._next = self._end = 0

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of zeros, aligned to a cache line; a storage of its own, which keeps the chunk."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if nbytes > self._end - self._next:
            self._map(max(nbytes, self._chunk))
        piece = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=self._next)
        self._next += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return piece

    def _map(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        begin = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self._next = -begin % HUGE_PAGE
        self._end = self._next + nbytes
