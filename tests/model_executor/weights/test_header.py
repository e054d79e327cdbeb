"""Headers: a good one, every way to be broken, and random damage. A broken file is named, never read past its end."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_executor.errors import CheckpointBroken
from model_executor.weights.header import read_header
from tests.fixtures.safetensors_file import header_bytes, write_file

TENSORS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, dtype=np.float32)}


def entry(begin: int, end: int, shape: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    """A header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_good_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, TENSORS, "bfloat16")
    header = read_header(path)
    assert list(header.entries) == ["b", "a"]
    first = header.entries["b"]
    assert (first.dtype, first.shape, first.nbytes, first.file) == ("BF16", (2, 3), 12, "model.safetensors")
    assert header.entries["a"].end == path.stat().st_size


def test_header_of_the_official_writer(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(3, 5), "y": torch.zeros(0), "z": torch.tensor(1.0)}, tmp_path / "m.safetensors")
    header = read_header(tmp_path / "m.safetensors")
    assert {name: found.shape for name, found in header.entries.items()} == {"x": (3, 5), "y": (0,), "z": ()}


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 269060552\n"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (LFS, "git-lfs pointer"),
        (b"", "0 bytes are no safetensors file"),
        (b"1234567", "7 bytes are no safetensors file"),
        (struct.pack("<Q", 2**60) + b"{}", f"header of {2**60} bytes"),
        (struct.pack("<Q", 100) + b"{}", "cut inside its header: 10 of at least 108 bytes"),
        (np.random.default_rng(0).bytes(4096), "no safetensors file"),
        (struct.pack("<Q", 4) + b"\xff{}{", "no valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 50_000) + b"[" * 50_000, "no valid JSON"),
        (header_bytes({"a": entry(0, 16, [4])}), "cut: a ends at byte"),
        (header_bytes({"a": entry(0, 16, [4])}) + b"0" * 17, "1 bytes behind the last tensor"),
        (header_bytes({"a": entry(4, 20, [4])}) + b"0" * 20, "a follows a gap"),
        (header_bytes({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}) + b"0" * 24, "b overlaps"),
        (header_bytes({"a": entry(0, 12, [4])}) + b"0" * 12, "a: 12 bytes do not hold F32"),
        (header_bytes({"a": entry(16, 0, [4])}) + b"0" * 16, "a: -16 bytes"),
        (header_bytes({"a": entry(-16, 0, [4])}) + b"0" * 16, "'a' is malformed"),
        (header_bytes({"a": entry(0, 16, [-4])}) + b"0" * 16, "'a' is malformed"),
        (header_bytes({"a": entry(0, 16, [4.0])}) + b"0" * 16, "'a' is malformed"),
        (header_bytes({"a": entry(0, 16, [True, 4])}) + b"0" * 16, "'a' is malformed"),
        (header_bytes({"a": entry(0, 2**70, [2**70], "U8")}) + b"0" * 16, "cut: a ends"),
        (header_bytes({"a": entry(0, 16, [4], "Q9")}) + b"0" * 16, "a: unknown dtype Q9"),
        (header_bytes({"a": entry(0, 16, [4], None)}) + b"0" * 16, "'a' is malformed"),
        (header_bytes({"a": {"dtype": "F32", "shape": [4]}}) + b"0" * 16, "'a' is malformed"),
        (header_bytes({"a": [1, 2]}) + b"0" * 16, "'a' is malformed"),
    ],
)
def test_broken_header(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointBroken, match=fault) as caught:
        read_header(path)
    assert caught.value.path == path
    assert str(path) in str(caught.value)


def test_name_twice(tmp_path: Path) -> None:
    one = json.dumps(entry(0, 4, [1]))
    text = f'{{"a": {one}, "a": {one}}}'.encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + b"0000")
    with pytest.raises(CheckpointBroken, match="a name stands twice"):
        read_header(tmp_path / "x")


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_cut_file(tmp_path: Path, share: float) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, TENSORS)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointBroken):
        read_header(path)


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointBroken, match="no regular file"):
        read_header(tmp_path)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.data())
def test_damage_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int, data: st.DataObject
) -> None:
    """Bytes overwritten anywhere: an error of the right type, or entries that lie inside the file."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write_file(path, TENSORS)
    good = path.read_bytes()
    at = min(at, len(good))
    keep = data.draw(st.booleans())
    path.write_bytes(good[:at] + junk + (good[at + len(junk) :] if keep else b""))
    size = path.stat().st_size
    try:
        header = read_header(path)
    except CheckpointBroken:
        return
    assert all(0 < found.begin <= found.end <= size for found in header.entries.values())
