from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_executor.errors import CheckpointBroken
from model_executor.weights.index import INDEX, Checkpoint
from tests.model_executor.engine import write_small

EMBEDDING = "model.embed_tokens.weight"


def edit_index(folder: Path, **weight_map: Any) -> None:
    """Change entries of the weight map; ... removes one."""
    index = json.loads((folder / INDEX).read_text())
    merged = {**index["weight_map"], **{name.replace("__", "."): file for name, file in weight_map.items()}}
    index["weight_map"] = {name: file for name, file in merged.items() if file is not ...}
    (folder / INDEX).write_text(json.dumps(index))


def test_shards_are_opened_when_asked_for(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_small(tmp_path, shards=5))
    assert len(checkpoint.shards) == 5
    assert checkpoint.opened == []
    (entry,) = checkpoint.entries([EMBEDDING]).values()
    assert entry.shape == (64, 32)
    assert checkpoint.opened == [entry.file]


def test_single_goes_before_the_index(tmp_path: Path) -> None:
    write_small(tmp_path, shards=3)
    write_small(tmp_path)
    assert Checkpoint.open(tmp_path).shards == ["model.safetensors"]


def test_revision_follows_config_and_listing_only(tmp_path: Path) -> None:
    first = Checkpoint.open(write_small(tmp_path / "a", shards=2))
    assert first.revision == Checkpoint.open(write_small(tmp_path / "b", shards=2)).revision
    assert first.revision != Checkpoint.open(write_small(tmp_path / "c", shards=3)).revision
    assert first.revision != Checkpoint.open(write_small(tmp_path / "d", shards=2, rope_theta=5.0)).revision
    before = first.revision
    first.entries([EMBEDDING])
    assert first.revision == before


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointBroken, match=r"neither model\.safetensors nor"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointBroken, match="no such folder"):
        Checkpoint.open(tmp_path / "gone")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "no valid JSON"),
        ("[]", "no JSON object"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": {}}', "weight_map is missing or empty"),
        ('{"weight_map": {"a": 1}}', "a: 1 is no name"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "is no name of a safetensors file"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "is no name of a safetensors file"),
        ('{"weight_map": {"a": ""}}', "is no name of a safetensors file"),
        ('{"weight_map": {"a": "a\\u0000.safetensors"}}', "is no name of a safetensors file"),
        ('{"weight_map": {"a": ".."}}', "is no name of a safetensors file"),
    ],
)
def test_broken_index(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointBroken, match=fault) as caught:
        Checkpoint.open(tmp_path)
    assert caught.value.path == tmp_path / INDEX


def test_index_and_shard_disagree(tmp_path: Path) -> None:
    folder = write_small(tmp_path, shards=2)
    first = Checkpoint.open(folder).files[EMBEDDING]
    edit_index(folder, ghost=first)
    with pytest.raises(CheckpointBroken, match="lacks a tensor of the index: ghost"):
        Checkpoint.open(folder).entries([EMBEDDING])
    edit_index(folder, ghost=..., model__layers__0__input_layernorm__weight=...)
    with pytest.raises(CheckpointBroken, match=r"holds a tensor that the index lacks: model\.layers\.0\.input"):
        Checkpoint.open(folder).entries([EMBEDDING])


def test_missing_shard_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_small(tmp_path, shards=2))
    path = checkpoint.path(checkpoint.files[EMBEDDING])
    path.unlink()
    with pytest.raises(CheckpointBroken, match="No such file") as caught:
        checkpoint.entries([EMBEDDING])
    assert caught.value.path == path
