"""From a checkpoint and a choice of blocks to a checkpoint of those blocks alone: planned, then written in one go."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct, structs

from model_executor.errors import CheckpointBroken, ConfigRefused, ToolMisused
from model_executor.models.config import read_json_object
from model_executor.models.fields import QUANTIZATION
from model_executor.models.spec import ModelSpec
from model_executor.tools.model import QUANTIZATION_FILES, OpenModel, read_structure
from model_executor.weights.cut_assets import CONFIG, RECORD, Assets, copy_assets, describe, find_assets
from model_executor.weights.cut_config import ConfigCut, Edit, Prediction
from model_executor.weights.cut_fields import DEPTH
from model_executor.weights.cut_quant import QuantCut
from model_executor.weights.cut_record import BlockRow, ClassCut, CutRecord, SourceFile, SourceModel, write_record
from model_executor.weights.cut_tensors import Move, OutFile, pack, write_files
from model_executor.weights.index import Checkpoint
from model_executor.weights.inventory import BlockPrefix, Inventory, take_stock
from model_executor.weights.layer_plan import LayerPlan, block_classes, compact, missing_classes
from model_executor.weights.plan import plan_load

# Of tensors in one file, unless told otherwise.
SHARD_BYTES: Final = 5 * 10**9
# For the record and the directory itself; and what a file may take beyond its end.
SPARE_BYTES: Final = 2**20
FILE_SPARE_BYTES: Final = 4096


class CutOptions(Struct, frozen=True):
    """How to cut.

    Attributes:
        layers: the choice of blocks.
        mode: "dummy" leaves the weights out.
        prediction: what becomes of the prediction blocks (MTP).
        allow_missing_classes: a class of blocks may be left out.
        max_shard_bytes: of tensors in one file.
        command: for the record.
    """

    layers: str
    mode: Literal["weights", "dummy"]
    prediction: Prediction
    allow_missing_classes: bool
    max_shard_bytes: int
    command: str


class Cut(Struct, frozen=True):
    """All that will be written.

    Attributes:
        model: the source.
        options: as given.
        plan: the blocks that remain.
        texts: files that are written anew, by name: config.json, and quantization files that had to change.
        edits: what changed in them.
        files: weight files; left_out: tensors that no file takes, counted by reason.
        assets: other files.
    """

    model: OpenModel
    options: CutOptions
    plan: LayerPlan
    texts: Mapping[str, bytes]
    edits: tuple[Edit, ...]
    files: tuple[OutFile, ...]
    left_out: Mapping[str, int]
    assets: Assets

    @property
    def bytes_to_copy(self) -> int:
        """Bytes of the tensors."""
        return sum(out.data_bytes for out in self.files)

    @property
    def bytes_to_write(self) -> int:
        """Bytes on disk, the record and the index roughly; never less than it will be."""
        names = [len(move.name) + len(move.entry.name) for out in self.files for move in out.moves]
        record = 512 * len(names) + 4 * sum(names) + SPARE_BYTES
        copied = sum(asset.nbytes for asset in self.assets.copied) + sum(map(len, self.texts.values()))
        files = len(self.files) + len(self.assets.copied) + len(self.texts)
        return sum(out.nbytes for out in self.files) + copied + record + FILE_SPARE_BYTES * files


def plan_cut(model: OpenModel, options: CutOptions) -> Cut:
    """Decide everything; nothing is written and no tensor read.

    Raises:
        ModelRefused: the choice, a field of the configuration, a tensor or a file cannot be honoured.
    """
    plan = model.plan(options.layers, allow_missing_classes=options.allow_missing_classes)
    folder = model.config.path.parent
    checkpoint = _weights(model, folder) if options.mode == "weights" else None
    stock = None if checkpoint is None else take_stock(model.spec, model.names, checkpoint)
    if checkpoint is not None and model.quantization is None:
        plan_load(model.spec, plan, model.names, checkpoint)
    kept_prediction = model.spec.mtp_layers if options.prediction == "keep" else 0
    modules = _modules(model, plan, stock, kept_prediction)
    fields, edits = _configuration(model, plan, options.prediction, modules)
    assets = find_assets(folder, () if model.checkpoint is None else model.checkpoint.shards)
    texts, more = _side_files(model, plan, modules, kept_prediction, assets)
    if edits:
        texts[CONFIG] = (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
    else:
        texts[CONFIG] = (folder / CONFIG).read_bytes()
    files: tuple[OutFile, ...] = ()
    left_out: Mapping[str, int] = {}
    if checkpoint is not None and stock is not None:
        files = pack(list(_moves(model, checkpoint, plan, stock, options.prediction)), options.max_shard_bytes)
        left_out = _left_out(stock, plan, options.prediction)
    remaining = tuple(asset for asset in assets.copied if asset.name not in texts)
    return Cut(
        model=model,
        options=options,
        plan=plan,
        texts=texts,
        edits=(*edits, *more),
        files=files,
        left_out=left_out,
        assets=structs.replace(assets, copied=remaining),
    )


def check_output(source: Path, out: Path, cut: Cut) -> int:
    """Pass an output folder that can be written; gives the bytes that are free for it.

    Everything is written beside it first, under another name on the same file system, and nowhere else.

    Raises:
        ToolMisused: it is there already, is where another file system is mounted, lies in the source, or its disk is
            too small.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir())):
        raise ToolMisused(f"OUT: {out}: is there already; a new or an empty folder is needed")
    if not out.absolute().parent.is_dir():
        raise ToolMisused(f"OUT: {out}: the folder above it does not exist")
    if out.is_mount():
        raise ToolMisused(
            f"OUT: {out}: is a file system of its own, whose name cannot be given away; name a folder in it"
        )
    if out.resolve().is_relative_to(source.resolve()):
        raise ToolMisused(f"OUT: {out}: lies in the source, which stays as it is")
    free = shutil.disk_usage(out.absolute().parent).free
    if free < cut.bytes_to_write:
        raise ToolMisused(f"OUT: {out}: takes {cut.bytes_to_write} bytes, and {free} are free there")
    return free


def write_cut(cut: Cut, out: Path, progress: Callable[[int], object]) -> CutRecord:
    """Write the folder under a name of its own beside OUT, and give it OUT's name once it is complete.

    Args:
        cut: as planned.
        out: as checked.
        progress: called with the bytes of tensors as they are copied.

    Raises:
        CheckpointBroken: a source file cannot be read to its end.
        OSError: a file cannot be written.
    """
    work = out.absolute().parent / f".{out.absolute().name}.{secrets.token_hex(6)}"
    work.mkdir()
    try:
        record = _fill(cut, work, progress)
        # The name of an empty folder is taken over by rename; a folder that was filled meanwhile makes it fail.
        work.rename(out)
        return record
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fill(cut: Cut, work: Path, progress: Callable[[int], object]) -> CutRecord:
    # First: a broken record of the source is refused before anything is copied.
    source = _source(cut)
    for name, text in sorted(cut.texts.items()):
        (work / name).write_bytes(text)
    assets = copy_assets(cut.assets.copied, work)
    tensors = []
    if cut.model.checkpoint is not None and cut.files:
        tensors = write_files(cut.model.checkpoint, cut.files, work, progress)
    spec, options = cut.model.spec, cut.options
    classes = block_classes(spec)
    record = CutRecord(
        tercet=_version(),
        command=options.command,
        mode=options.mode,
        prediction=options.prediction if spec.mtp_layers else None,
        source=source,
        blocks=tuple(BlockRow(i, s, cut.plan.classes[i]) for i, s in enumerate(cut.plan.sources)),
        classes=tuple(
            ClassCut(each.name, compact(each.sources), compact(s for s in cut.plan.sources if s in each.sources))
            for each in classes
        ),
        classes_left_out=tuple(each.name for each in missing_classes(spec, cut.plan)),
        edits=cut.edits,
        tensors=tuple(tensors),
        bytes=cut.bytes_to_copy,
        left_out=cut.left_out,
        assets=(*(describe(work, name) for name in sorted(cut.texts)), *assets),
        assets_left_out=cut.assets.left,
    )
    write_record(record, work)
    _sync(work)
    return record


def _source(cut: Cut) -> SourceModel:
    checkpoint, folder = cut.model.checkpoint, cut.model.config.path.parent
    used = sorted({move.entry.file for out in cut.files for move in out.moves})
    files: list[SourceFile] = []
    if checkpoint is not None:
        files = [SourceFile(file, hashlib.sha256(checkpoint.header(file).raw).hexdigest()) for file in used]
    return SourceModel(
        name=folder.resolve().name,
        revision=None if checkpoint is None else checkpoint.revision,
        config_sha256=hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest(),
        blocks=len(cut.model.spec.layers),
        prediction_blocks=cut.model.spec.mtp_layers,
        files=tuple(files),
        files_not_needed=() if checkpoint is None else tuple(file for file in checkpoint.shards if file not in used),
        cut_of=read_json_object(folder / RECORD).get("source") if (folder / RECORD).is_file() else None,
    )


def _weights(model: OpenModel, folder: Path) -> Checkpoint:
    if model.checkpoint is None:
        raise CheckpointBroken(folder, "holds no weights; --mode dummy cuts the configuration alone")
    return model.checkpoint


def _configuration(
    model: OpenModel, plan: LayerPlan, prediction: Prediction, modules: list[str]
) -> tuple[dict[str, Any], list[Edit]]:
    path, spec = model.config.path, model.spec
    section, fields = model.section, dict(model.config.fields)
    moved = ConfigCut(fields if section is None else fields[section], plan.sources, prediction, path)
    moved.run()
    if section is None:
        fields, edits = moved.fields, moved.edits
    else:
        fields[section] = moved.fields
        edits = [structs.replace(edit, field=f"{section}.{edit.field}") for edit in moved.edits]
    _check_same(model, plan, read_structure(path, fields), prediction)
    kept = spec.mtp_layers if prediction == "keep" else 0
    quant = _quant_cut(model, plan, path, modules, kept)
    for field in QUANTIZATION:
        if field in fields:
            fields[field] = quant.moved(fields[field], field)
    return fields, edits + quant.edits


def _quant_cut(model: OpenModel, plan: LayerPlan, path: Path, modules: list[str], prediction: int) -> QuantCut:
    apart = [rule.pattern for rule in model.names.ignored if rule.other_part]
    return QuantCut(modules, plan.sources, len(model.spec.layers), path, prediction=prediction, apart=apart)


def _side_files(
    model: OpenModel, plan: LayerPlan, modules: list[str], prediction: int, assets: Assets
) -> tuple[dict[str, bytes], list[Edit]]:
    """Quantization files whose paths had to move, and how."""
    texts: dict[str, bytes] = {}
    edits: list[Edit] = []
    for asset in assets.copied:
        if asset.name not in QUANTIZATION_FILES:
            continue
        quant = _quant_cut(model, plan, asset.path, modules, prediction)
        value = quant.moved(read_json_object(asset.path), asset.name)
        if quant.edits:
            texts[asset.name] = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
            edits += quant.edits
    return texts, edits


def _check_same(model: OpenModel, plan: LayerPlan, made: ModelSpec, prediction: Prediction) -> None:
    """The proof that the edits are right: the new configuration reads as the same blocks, and the same model around.

    Raises:
        ConfigRefused: naming the first block that would be another one.
    """
    spec, path = model.spec, model.config.path
    new_of = {source: index for index, source in enumerate(plan.sources)}
    wanted = []
    for index, layer in enumerate(plan.layers(spec)):
        needs = tuple(new_of[donor] for donor in layer.needs)
        wanted.append(structs.replace(layer, source=index, needs=needs))
    for layer, given in zip(wanted, made.layers, strict=True):
        if layer != given:
            source = plan.sources[layer.source]
            fault = f"block {source} would be read as {given.class_name} under its new index {layer.source}"
            raise ConfigRefused(DEPTH, len(spec.layers), fault, path)
    # A block that is gone may have been the one that bound the length; the others are exact beyond it.
    length = max(spec.max_model_len, made.max_model_len)
    kept = spec.mtp_layers if prediction == "keep" else 0
    around = structs.replace(spec, layers=(), mtp_layers=kept, max_model_len=length)
    if structs.replace(made, layers=()) != around:
        raise ConfigRefused(
            DEPTH, len(spec.layers), "without the other blocks the model around them reads otherwise", path
        )


def _modules(model: OpenModel, plan: LayerPlan, stock: Inventory | None, prediction: int) -> list[str]:
    """Modules that remain, under their old names."""
    tensors = {source.name for parameter in model.parameters(plan) for source in parameter.sources}
    if stock is not None:
        tensors.update(stock.of(plan.sources))
        tensors.update(name for block in range(prediction) for name in stock.prediction.get(block, ()))
    return sorted({tensor.rpartition(".")[0] for tensor in tensors})


def _moves(
    model: OpenModel, checkpoint: Checkpoint, plan: LayerPlan, stock: Inventory, prediction: Prediction
) -> Iterator[Move]:
    """Every tensor that goes along: the embedding, the blocks, the prediction blocks, the rest."""
    prefix = BlockPrefix(model.names)
    first = [name for name in stock.outer if name == model.names.embedding]
    wanted = {name: name for name in first}
    groups = {index: stock.blocks[source] for index, source in enumerate(plan.sources)}
    if prediction == "keep":
        groups |= {len(plan.sources) + block: group for block, group in stock.prediction.items()}
    for index, group in groups.items():
        wanted |= {name: prefix.moved(name, index) for name in group}
    wanted |= {name: name for name in (*stock.outer, *stock.other_parts) if name not in first}
    entries = checkpoint.entries(wanted)
    for name, new in wanted.items():
        yield Move(entries[name], new)


def _left_out(stock: Inventory, plan: LayerPlan, prediction: Prediction) -> dict[str, int]:
    cut = sum(len(group) for block, group in stock.blocks.items() if block not in plan.sources)
    dropped = sum(map(len, stock.prediction.values())) if prediction == "drop" else 0
    counts = Counter({"its block is cut": cut, "its prediction block (MTP) is dropped": dropped})
    counts.update(stock.ignored.values())
    return {reason: count for reason, count in sorted(counts.items()) if count}


def _sync(folder: Path) -> None:
    """Let what was written reach the disk before it gets its name."""
    for path in [*(path for path in folder.rglob("*")), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _version() -> str:
    try:
        return version("tercet")
    except PackageNotFoundError:
        return "0.0.0"
