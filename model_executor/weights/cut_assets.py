"""The files of a model folder beside configuration and weights: found, checked and copied, links followed.

A link may lead to a file in the folder, or to the blobs of the download cache that the folder is a snapshot of. One
that leads anywhere else is refused: what it points at is no part of the model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from model_executor.errors import CheckpointBroken
from model_executor.weights.index import INDEX

MARKDOWN: Final = "TERCET_CUT.md"
RECORD: Final = "tercet_cut.json"
CONFIG: Final = "config.json"
# Written anew, or belonging to another state of the folder.
OWN: Final = frozenset({CONFIG, INDEX, MARKDOWN, RECORD})
WEIGHTS: Final = frozenset({
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack"),
    *(".ot", ".npz", ".npy", ".tflite", ".mlmodel", ".pkl", ".pickle", ".nemo", ".zip", ".tar", ".gz"),
})  # fmt: skip
DEEPEST: Final = 8


class Asset(Struct, frozen=True):
    """A file to copy.

    Attributes:
        name: relative to the folder, with slashes.
        path: the file itself, links followed.
        nbytes: its size.
    """

    name: str
    path: Path
    nbytes: int


class CopiedAsset(Struct, frozen=True):
    """A file that was copied, or written: its name, size and digest."""

    file: str
    nbytes: int
    sha256: str


class Assets(Struct, frozen=True):
    """What a folder holds beside configuration and weights.

    Attributes:
        copied: what goes along, sorted by name.
        left: names of what does not, with the reason.
    """

    copied: tuple[Asset, ...]
    left: dict[str, str]


def find_assets(folder: Path, known: Collection[str] = ()) -> Assets:
    """Look through the folder.

    Args:
        folder: the model folder.
        known: files that are accounted for elsewhere.

    Raises:
        CheckpointBroken: a link that leads nowhere, in a circle or out of the model.
    """
    root = folder.resolve()
    copied: list[Asset] = []
    left: dict[str, str] = {}
    for name, path in _walk(folder, root, "", 0):
        if name in OWN or name in known:
            continue
        if reason := _left(name, path):
            left[name] = reason
        else:
            copied.append(Asset(name, path, path.stat().st_size))
    return Assets(tuple(sorted(copied, key=lambda asset: asset.name)), dict(sorted(left.items())))


def copy_assets(assets: tuple[Asset, ...], folder: Path) -> list[CopiedAsset]:
    """Copy them as plain files.

    Raises:
        OSError: a file cannot be read or written.
    """
    made = []
    for asset in assets:
        target = folder / asset.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(asset.path, target)
        made.append(describe(folder, asset.name))
    return made


def describe(folder: Path, name: str) -> CopiedAsset:
    """Size and digest of a file."""
    path = folder / name
    with path.open("rb") as file:
        return CopiedAsset(name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _walk(folder: Path, root: Path, prefix: str, depth: int) -> Iterator[tuple[str, Path]]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name, path = f"{prefix}{entry.name}", Path(entry.path)
        if entry.name.startswith(".") or _is_weights(name):
            yield name, path
            continue
        real = _real(path, root) if entry.is_symlink() else path
        if not real.is_dir():
            yield name, real
        elif depth == DEEPEST or (entry.is_symlink() and path.is_relative_to(real)):
            raise CheckpointBroken(path, "a folder that holds itself, or is nested too deeply")
        else:
            yield from _walk(real, root, f"{name}/", depth + 1)


def _real(path: Path, root: Path) -> Path:
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointBroken(path, "a link that leads nowhere") from error
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointBroken(path, f"a link that leads out of the model, to {real}")
    return real


def _is_weights(name: str) -> bool:
    return Path(name).suffix.lower() in WEIGHTS or name.endswith((".safetensors.index.json", ".bin.index.json"))


def _left(name: str, path: Path) -> str | None:
    if Path(name).name.startswith("."):
        return "hidden"
    if _is_weights(name):
        return "weights, or an archive"
    return None if stat.S_ISREG(path.stat().st_mode) else "no regular file"
