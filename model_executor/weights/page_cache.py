"""How much of a file is in memory already, so that a cold start and a warm one are told apart."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def resident_share(ranges: Mapping[Path, Sequence[tuple[int, int]]]) -> float | None:
    """Share of these byte ranges that the page cache holds: 0 cold, 1 warm.

    Args:
        ranges: [begin, end) in each file.

    Returns:
        None where the kernel does not tell: it answers only the owner of a file and those who may write it.
    """
    resident = total = 0
    for path, spans in ranges.items():
        pages = _resident_pages(path)
        if pages is None:
            return None
        for begin, end in spans:
            span = pages[begin // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)]
            resident += sum(page & 1 for page in span)
            total += len(span)
    return resident / total if total else None


def _resident_pages(path: Path) -> bytes | None:
    """One byte a page of the file; bit 0 is set when the page is in memory."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        if status.st_size == 0:
            return b""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            return _mincore(mapped, status.st_size)


def _mincore(mapped: mmap.mmap, size: int) -> bytes | None:
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    anchor = ctypes.c_char.from_buffer(mapped)
    try:
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), pages)
    finally:
        del anchor  # The map cannot be closed while something points into it.
    return None if failed else bytes(pages)
