"""The record of a cut, for programs and for people."""

from __future__ import annotations

from pathlib import Path

import msgspec

from model_executor.weights.cut_assets import MARKDOWN, RECORD, CopiedAsset
from model_executor.weights.cut_config import Edit
from model_executor.weights.cut_record import (
    NOTES,
    BlockRow,
    ClassCut,
    CutRecord,
    SourceFile,
    SourceModel,
    markdown,
    write_record,
)
from model_executor.weights.cut_tensors import Copied

SOURCE = SourceModel("big", "abcd", "c0", 6, 1, (SourceFile("a.safetensors", "h0"),), ("b.safetensors",), None)
MADE = CutRecord(
    tercet="1.2",
    command="tercet cut big OUT --layers 0,5",
    mode="weights",
    prediction="drop",
    source=SOURCE,
    blocks=(BlockRow(0, 0, "dense"), BlockRow(1, 5, "moe|wide")),
    classes=(ClassCut("dense", "0-2", "0"), ClassCut("moe|wide", "3-5", "5"), ClassCut("odd", "9", "")),
    classes_left_out=("odd",),
    edits=(Edit("num_hidden_layers", 6, 2, "fewer"), Edit("layer_types", None, ["a", "b"], "written out")),
    tensors=(Copied("n", "s", "model.safetensors", "a.safetensors", "F32", (2,), 8, "d0"),),
    bytes=8,
    left_out={"its block is cut": 36},
    assets=(CopiedAsset("config.json", 3, "e0"),),
    assets_left_out={".git": "hidden"},
)


def test_it_reads_back(tmp_path: Path) -> None:
    write_record(MADE, tmp_path)
    assert msgspec.json.decode((tmp_path / RECORD).read_bytes(), type=CutRecord) == MADE
    assert (tmp_path / MARKDOWN).read_text() == markdown(MADE)


def test_people_find_everything() -> None:
    text = markdown(MADE)
    for line in (
        "    tercet cut big OUT --layers 0,5",
        "| 1 | 5 | moe\\|wide |",
        "| odd | 9 | none |",
        "| num_hidden_layers | 6 | 2 | fewer |",
        '| layer_types | absent | ["a","b"] | written out |',
        "| 36 | its block is cut |",
        "| .git | hidden |",
        *(f"- {note}" for note in NOTES),
    ):
        assert line in text.splitlines()
    assert "abcd" in text
    assert "2 of the 6 blocks of big" in text


def test_nothing_to_tell_is_said() -> None:
    bare = msgspec.structs.replace(MADE, edits=(), left_out={}, assets_left_out={}, prediction=None)
    text = markdown(bare)
    assert "## Edits\n\nnone" in text
    assert "the source has none" in text
