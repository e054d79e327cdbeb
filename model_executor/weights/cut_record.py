"""The provenance of a cut checkpoint: what it was made from, how, and what it can and cannot show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from model_executor.weights.cut_assets import MARKDOWN, RECORD, CopiedAsset
from model_executor.weights.cut_config import Edit
from model_executor.weights.cut_tensors import Copied

NOTES: Final = (
    "The output of a part of a model is not the output of the model: nothing here speaks for its quality.",
    "The end of a sequence may never come: ask with ignore_eos and max_tokens.",
    "Times of single blocks can be compared with the source's, end-to-end times cannot: embedding and head weigh more.",
    "With --load-format dummy, weights are drawn by tensor name: they differ from those that the source would get.",
)


class SourceFile(Struct, frozen=True):
    """A weight file of the source that was read.

    Attributes:
        file: its name.
        header_sha256: of the bytes of its header.
    """

    file: str
    header_sha256: str


class SourceModel(Struct, frozen=True):
    """What was cut.

    Attributes:
        name: of the folder.
        revision: of the checkpoint: a digest of configuration and index or header; None: it holds no weights.
        config_sha256: of config.json.
        blocks: how many it has.
        prediction_blocks: behind them (MTP).
        files: that were read.
        files_not_needed: that were not opened.
        cut_of: the source's own record, if it is a cut itself.
    """

    name: str
    revision: str | None
    config_sha256: str
    blocks: int
    prediction_blocks: int
    files: tuple[SourceFile, ...]
    files_not_needed: tuple[str, ...]
    cut_of: dict[str, Any] | None


class BlockRow(Struct, frozen=True):
    """A block of the cut checkpoint, and the source block it is."""

    block: int
    source: int
    kind: str


class ClassCut(Struct, frozen=True):
    """A class of blocks: where it stood in the source, and which of it are kept."""

    name: str
    sources: str
    kept: str


class CutRecord(Struct, frozen=True):
    """The whole provenance.

    Attributes:
        format: version of this record.
        tercet: version of the program.
        command: that makes the same folder again; SRC and OUT stand for the folders.
        mode: "weights", or "dummy": configuration and assets alone.
        prediction: what became of the prediction blocks; None: the source has none.
        source: what was cut.
        blocks: new index to source index.
        classes: of the source's blocks; classes_left_out: those of which no block is kept.
        edits: of config.json and of quantization files, all of them.
        tensors: every tensor; bytes: of all of them.
        left_out: tensors of the source that are not here: how many, by reason.
        assets: other files, as they are here.
        assets_left_out: other files of the source that are not here, with the reason.
        notes: what this checkpoint cannot show.
    """

    tercet: str
    command: str
    mode: Literal["weights", "dummy"]
    prediction: Literal["keep", "drop"] | None
    source: SourceModel
    blocks: tuple[BlockRow, ...]
    classes: tuple[ClassCut, ...]
    classes_left_out: tuple[str, ...]
    edits: tuple[Edit, ...]
    tensors: tuple[Copied, ...]
    bytes: int
    left_out: Mapping[str, int]
    assets: tuple[CopiedAsset, ...]
    assets_left_out: Mapping[str, str]
    notes: tuple[str, ...] = NOTES
    format: Literal[1] = 1


def write_record(record: CutRecord, folder: Path) -> None:
    """Write both forms into the folder."""
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    (folder / MARKDOWN).write_text(markdown(record), encoding="utf-8")


def markdown(record: CutRecord) -> str:
    """The record for people."""
    source = record.source
    facts = [
        f"source revision: {source.revision or 'no weights'}; config.json sha256: {source.config_sha256}",
        f"mode: {record.mode}; prediction blocks (MTP): {record.prediction or 'the source has none'}",
        f"tensors: {len(record.tensors)}, {record.bytes} bytes",
        f"source files read: {len(source.files)}, not needed: {len(source.files_not_needed)}",
    ]
    blocks = f"{len(record.blocks)} of the {source.blocks} blocks of {source.name}, made by Tercet {record.tercet}."
    parts = [
        "# A cut checkpoint",
        f"{blocks} `{RECORD}` holds the same with the digest of every tensor.",
        f"    {record.command}",
        _items(facts),
        "## Blocks",
        _table(
            ("block", "source block", "class"), [(str(row.block), str(row.source), row.kind) for row in record.blocks]
        ),
        "## Classes",
        _table(
            ("class", "in the source", "kept"), [(row.name, row.sources, row.kept or "none") for row in record.classes]
        ),
        "## Edits",
        _table(
            ("field", "before", "after", "why"),
            [(edit.field, _json(edit.before), _json(edit.after), edit.why) for edit in record.edits],
        ),
        "## Left out",
        _table(("tensors", "why"), [(str(count), reason) for reason, count in record.left_out.items()]),
        _table(("file", "why"), list(record.assets_left_out.items())),
        "## What this checkpoint cannot show",
        _items(record.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "none"
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _json(value: object) -> str:
    return "absent" if value is None else msgspec.json.encode(value).decode()
