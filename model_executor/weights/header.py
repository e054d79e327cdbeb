"""The header of a safetensors file: which tensor lies where. Nothing behind the header is read.

Format: 8 bytes with the header's length (little endian), the header as a JSON object from tensor name to dtype, shape
and [begin, end) counted from the header's end, then the data. The data must be covered without gap or overlap.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeGuard

from msgspec import Struct

from model_executor.errors import CheckpointBroken

LARGEST_HEADER: Final = 100_000_000
PREFIX: Final = struct.Struct("<Q")
METADATA: Final = "__metadata__"
ITEM_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip


class Entry(Struct, frozen=True):
    """A tensor in a file.

    Attributes:
        name: of the tensor.
        file: its file, relative to the model folder.
        dtype: in safetensors' spelling ("BF16").
        shape: as stored.
        begin, end: bytes of the file that hold it.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.end - self.begin


class Header(Struct, frozen=True):
    """What a file holds.

    Attributes:
        entries: by name, in the order of the data.
        raw: the header's bytes, for a digest.
    """

    entries: Mapping[str, Entry]
    raw: bytes


def read_header(path: Path, *, cut: bool = False) -> Header:
    """Read and check the header.

    Args:
        path: the file.
        cut: whether the file may end before its data does, as one of which only the header was fetched.

    Raises:
        CheckpointBroken: with the path and what is wrong.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointBroken(path, "no regular file: a pipe would be waited for")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = _raw_header(path, file, size)
    except OSError as error:
        raise CheckpointBroken(path, error.strerror or "cannot be read") from error
    start = PREFIX.size + len(raw)
    fields = _parse(path, raw)
    entries = [_entry(path, name, field, start) for name, field in fields.items() if name != METADATA]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = max((entry.end for entry in entries), default=start)
    _check_cover(path, entries, start, end if cut and size < end else size)
    return Header({entry.name: entry for entry in entries}, raw)


def _raw_header(path: Path, file: BinaryIO, size: int) -> bytes:
    prefix = file.read(PREFIX.size)
    if prefix == b"version ":
        raise CheckpointBroken(path, "a git-lfs pointer, not the file itself: fetch it with git lfs pull")
    if len(prefix) < PREFIX.size:
        raise CheckpointBroken(path, f"{size} bytes are no safetensors file")
    (length,) = PREFIX.unpack(prefix)
    if length > LARGEST_HEADER:
        raise CheckpointBroken(path, f"no safetensors file: header of {length} bytes, at most {LARGEST_HEADER}")
    if PREFIX.size + length > size:
        raise CheckpointBroken(path, f"cut inside its header: {size} of at least {PREFIX.size + length} bytes")
    raw = file.read(length)
    if len(raw) < length:
        raise CheckpointBroken(path, "changed while it was read")
    return raw


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise CheckpointBroken(path, f"no safetensors file: header is no valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointBroken(path, "no safetensors file: header is no JSON object")
    return fields


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name stands twice")
    return fields


def _entry(path: Path, name: str, field: object, start: int) -> Entry:
    fault = CheckpointBroken(path, f"header entry {name!r} is malformed")
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise fault
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not (isinstance(dtype, str) and _naturals(shape) and _naturals(offsets) and len(offsets) == 2):
        raise fault
    if dtype not in ITEM_BITS:
        raise CheckpointBroken(path, f"{name}: unknown dtype {dtype}")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * ITEM_BITS[dtype]:
        raise CheckpointBroken(path, f"{name}: {end - begin} bytes do not hold {dtype} of shape {shape}")
    return Entry(name, path.name, dtype, tuple(shape), start + begin, start + end)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(path: Path, entries: list[Entry], start: int, size: int) -> None:
    place = start
    for entry in entries:
        if entry.end > size:
            raise CheckpointBroken(path, f"cut: {entry.name} ends at byte {entry.end}, the file has {size}")
        if entry.begin != place:
            how = "overlaps another tensor" if entry.begin < place else "follows a gap"
            raise CheckpointBroken(path, f"{entry.name} {how}")
        place = entry.end
    if place != size:
        raise CheckpointBroken(path, f"{size - place} bytes behind the last tensor")
