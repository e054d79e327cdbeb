"""Packing tensors into files, and copying their bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from model_executor.errors import CheckpointBroken
from model_executor.weights import cut_tensors
from model_executor.weights.cut_tensors import Move, index_of, pack, write_files
from model_executor.weights.header import read_header
from model_executor.weights.index import INDEX, Checkpoint

TENSORS = {
    "odd": torch.arange(3, dtype=torch.int8),
    "wide": torch.arange(4, dtype=torch.float32),
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """TENSORS in one file, and a configuration."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return Checkpoint.open(folder)


def moves(checkpoint: Checkpoint) -> list[Move]:
    return [Move(entry, f"new.{name}") for name, entry in checkpoint.entries(TENSORS).items()]


@pytest.mark.parametrize("largest", [10**9, 16, 1])
def test_the_bytes_arrive(
    checkpoint: Checkpoint, tmp_path: Path, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_tensors, "BUFFER_BYTES", 5)
    out = tmp_path / "out"
    out.mkdir()
    files = pack(moves(checkpoint), largest)
    seen: list[int] = []
    copied = write_files(checkpoint, files, out, seen.append)
    assert max(seen) <= 5
    assert sum(seen) == sum(file.data_bytes for file in files)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        assert (out / file.file).stat().st_size == file.nbytes
        assert file.data_bytes <= largest or len(file.moves) == 1
        with safe_open(out / file.file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    assert found.keys() == {f"new.{name}" for name in TENSORS}
    assert all(torch.equal(found[f"new.{name}"], tensor) for name, tensor in TENSORS.items())
    for record in copied:
        raw = TENSORS[record.source].flatten().view(torch.uint8).numpy().tobytes() if record.nbytes else b""
        assert record.sha256 == hashlib.sha256(raw).hexdigest()
        assert record.name == f"new.{record.source}"


def test_the_index_is_true(checkpoint: Checkpoint, tmp_path: Path) -> None:
    files = pack(moves(checkpoint), 16)
    assert len(files) > 2
    assert [file.file for file in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    write_files(checkpoint, files, tmp_path, lambda _: None)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == index_of(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for file in files:
        names = {name for name, place in index["weight_map"].items() if place == file.file}
        assert names == set(read_header(tmp_path / file.file).entries)


def test_one_file_has_no_index(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (file,) = pack(moves(checkpoint), 10**9)
    assert file.file == "model.safetensors"
    write_files(checkpoint, [file], tmp_path, lambda _: None)
    assert not (tmp_path / INDEX).exists()


def test_every_tensor_begins_at_a_multiple_of_its_items(checkpoint: Checkpoint) -> None:
    (file,) = pack(moves(checkpoint), 10**9)
    place = len(file.head)
    for move in file.moves:
        size = move.entry.nbytes // max(1, int(np.prod(move.entry.shape)))
        assert size == 0 or place % size == 0
        place += move.entry.nbytes
    assert len(file.head) % 8 == 0


def test_a_source_that_was_cut_short_meanwhile(checkpoint: Checkpoint, tmp_path: Path) -> None:
    files = pack(moves(checkpoint), 10**9)
    path = checkpoint.path("model.safetensors")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CheckpointBroken, match="the file ends 2 bytes too early"):
        write_files(checkpoint, files, tmp_path, lambda _: None)
