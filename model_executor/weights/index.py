"""The tensors of a checkpoint by name: model.safetensors alone, or shards with model.safetensors.index.json.

A shard is opened when one of its tensors is asked for. Shards of which nothing is asked may be missing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from model_executor.errors import CheckpointBroken
from model_executor.models.config import read_json_object
from model_executor.weights.header import Entry, Header, read_header

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
FILE_NAME: Final = re.compile(r"[^/\0]+\.safetensors")


class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        folder: the model folder.
        files: the file of each tensor, relative to the folder.
        revision: a digest of config.json and of what lists the tensors: the index, or the only header.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, str], listing: bytes, headers: dict[str, Header], *, cut: bool = False
    ) -> None:
        self.folder = folder
        self._cut = cut
        self.files = files
        self.revision = _digest(folder, listing)
        self._headers = headers

    @classmethod
    def open(cls, folder: Path, *, cut: bool = False) -> Checkpoint:
        """Find the checkpoint of a model folder; model.safetensors goes before an index, as in transformers.

        Args:
            folder: the model folder.
            cut: whether files may end before their data does; for those who read headers alone.

        Raises:
            CheckpointBroken: none there, or one that is damaged.
        """
        if not folder.is_dir():
            raise CheckpointBroken(folder, "no such folder")
        if (folder / SINGLE).exists():
            header = read_header(folder / SINGLE, cut=cut)
            return cls(folder, dict.fromkeys(header.entries, SINGLE), header.raw, {SINGLE: header}, cut=cut)
        index = folder / INDEX
        if not index.exists():
            raise CheckpointBroken(folder, f"neither {SINGLE} nor {INDEX} is there")
        return cls(folder, _weight_map(index), index.read_bytes(), {}, cut=cut)

    @property
    def shards(self) -> list[str]:
        """All files, sorted."""
        return sorted(set(self.files.values()))

    @property
    def opened(self) -> list[str]:
        """Files whose header was read, sorted."""
        return sorted(self._headers)

    def entries(self, names: Iterable[str]) -> dict[str, Entry]:
        """Where these tensors lie.

        Args:
            names: each among `files`.

        Raises:
            CheckpointBroken: a shard is missing, damaged, or does not hold what the index says.
        """
        return {name: self.header(self.files[name]).entries[name] for name in names}

    def path(self, file: str) -> Path:
        """The path of one of the files."""
        return self.folder / file

    def is_cut(self, file: str) -> bool:
        """Whether a file whose header was read ends before its data does."""
        end = max((entry.end for entry in self._headers[file].entries.values()), default=0)
        return self.path(file).stat().st_size < end

    def header(self, file: str) -> Header:
        """The header of one of the files, read once.

        Raises:
            CheckpointBroken: the file is missing, damaged, or does not hold what the index says.
        """
        if file not in self._headers:
            header = read_header(self.path(file), cut=self._cut)
            listed = {name for name, place in self.files.items() if place == file}
            for name in sorted(listed ^ header.entries.keys()):
                fault = "lacks a tensor of the index" if name in listed else "holds a tensor that the index lacks"
                raise CheckpointBroken(self.path(file), f"{fault}: {name}")
            self._headers[file] = header
        return self._headers[file]


def _weight_map(path: Path) -> dict[str, str]:
    weight_map: Any = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointBroken(path, "weight_map is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise CheckpointBroken(path, f"weight_map: {name}: {file!r} is no name of a safetensors file here")
    return weight_map


def _digest(folder: Path, listing: bytes) -> str:
    path = folder / "config.json"
    try:
        config = path.read_bytes()
    except OSError as error:
        raise CheckpointBroken(path, error.strerror or "cannot be read") from error
    digest = hashlib.sha256()
    for part in (config, listing):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]
