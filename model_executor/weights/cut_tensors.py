"""Copies tensors of one checkpoint into the files of another, byte by byte, with a buffer of bounded size."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from msgspec import Struct

from model_executor.errors import CheckpointBroken
from model_executor.weights.header import ITEM_BITS, METADATA, PREFIX, Entry
from model_executor.weights.index import INDEX, SINGLE, Checkpoint

BUFFER_BYTES: Final = 8 * 2**20
# transformers wants to know which library's layout the tensors have.
LAYOUT: Final = {"format": "pt"}


class Move(Struct, frozen=True):
    """A tensor and its new name."""

    entry: Entry
    name: str


class OutFile(Struct, frozen=True):
    """A weight file to be.

    Attributes:
        file: its name.
        moves: in the order of the data.
        head: all bytes before the data.
    """

    file: str
    moves: tuple[Move, ...]
    head: bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(move.entry.nbytes for move in self.moves)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.head) + self.data_bytes


class Copied(Struct, frozen=True):
    """A tensor that was copied.

    Attributes:
        name: here; source: in the source checkpoint.
        file: here; source_file: in the source folder.
        dtype, shape: as stored.
        nbytes: of the tensor.
        sha256: of its bytes.
    """

    name: str
    source: str
    file: str
    source_file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str


def pack(moves: Sequence[Move], largest: int) -> tuple[OutFile, ...]:
    """Share tensors out among files, in order.

    Args:
        moves: the tensors.
        largest: bytes of tensors in a file; one that is larger by itself gets a file of its own.
    """
    groups: list[list[Move]] = [[]]
    size = 0
    for move in moves:
        if groups[-1] and size + move.entry.nbytes > largest:
            groups.append([])
            size = 0
        groups[-1].append(move)
        size += move.entry.nbytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return tuple(_out_file(name, group) for name, group in zip(names, groups, strict=True))


def index_of(files: Sequence[OutFile]) -> dict[str, object]:
    """The index of several files."""
    weight_map = {move.name: out.file for out in files for move in out.moves}
    return {
        "metadata": {"total_size": sum(out.data_bytes for out in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }


def write_files(
    checkpoint: Checkpoint, files: Sequence[OutFile], folder: Path, progress: Callable[[int], object]
) -> list[Copied]:
    """Write all files, and the index if there are several.

    Args:
        checkpoint: that the tensors come from.
        files: as packed.
        folder: where they go.
        progress: called with the bytes of each portion.

    Raises:
        CheckpointBroken: a source file cannot be read to its end.
        OSError: a file cannot be written.
    """
    copied: list[Copied] = []
    for out in files:
        with (folder / out.file).open("xb") as target:
            target.write(out.head)
            copied += [_copy(checkpoint, move, out.file, target, progress) for move in out.moves]
            target.flush()
            os.fsync(target.fileno())
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(index_of(files), indent=2) + "\n", encoding="utf-8")
    return copied


def _out_file(file: str, group: list[Move]) -> OutFile:
    # Wide items first: each tensor then begins at a multiple of its item's size, which readers that map the file need.
    moves = sorted(group, key=lambda move: -ITEM_BITS[move.entry.dtype])
    header: dict[str, object] = {METADATA: LAYOUT}
    place = 0
    for move in moves:
        entry = move.entry
        offsets = [place, place + entry.nbytes]
        header[move.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        place += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return OutFile(file, tuple(moves), PREFIX.pack(len(text)) + text)


def _copy(checkpoint: Checkpoint, move: Move, file: str, target: BinaryIO, progress: Callable[[int], object]) -> Copied:
    entry, digest = move.entry, hashlib.sha256()
    for portion in _portions(checkpoint.path(entry.file), entry):
        digest.update(portion)
        target.write(portion)
        progress(len(portion))
    sha256 = digest.hexdigest()
    return Copied(move.name, entry.name, file, entry.file, entry.dtype, entry.shape, entry.nbytes, sha256)


def _portions(path: Path, entry: Entry) -> Iterator[memoryview]:
    """The tensor's bytes; each portion is valid until the next is asked for."""
    buffer = memoryview(bytearray(min(BUFFER_BYTES, entry.nbytes)))
    try:
        with path.open("rb", buffering=0) as source:
            source.seek(entry.begin)
            left = entry.nbytes
            while left:
                read = source.readinto(buffer[: min(left, len(buffer))])
                if not read:
                    raise CheckpointBroken(path, f"{entry.name}: the file ends {left} bytes too early")
                yield buffer[:read]
                left -= read
    except OSError as error:
        raise CheckpointBroken(path, error.strerror or "cannot be read") from error
