"""The load plan: every tensor of the checkpoint and every parameter of the model accounted for before any is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct, structs

from engine_core.wire.reports import TensorRecord
from model_executor.errors import WeightsRefused
from model_executor.models.spec import Dtype, ModelSpec
from model_executor.weights.header import Entry
from model_executor.weights.index import Checkpoint
from model_executor.weights.layer_plan import LayerPlan, plan_layers
from model_executor.weights.parameters import (
    EMBEDDING,
    NameTable,
    Parameter,
    Source,
    block_parameters,
    head_parameter,
    outer_parameters,
)

DTYPES: Final[Mapping[str, Dtype]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
MTP_RULE: Final = "a block that predicts further tokens (num_nextn_predict_layers); it does not run"


class Step(Struct, frozen=True):
    """Copy one tensor to its place in a parameter.

    Attributes:
        entry: the tensor.
        parameter: the parameter.
        offset: where it begins along the parameter's output axis (the last if transposed, else the first).
    """

    entry: Entry
    parameter: Parameter
    offset: int


class LoadPlan(Struct, frozen=True):
    """All that a load does.

    Attributes:
        parameters: of the model, in its order.
        steps: in the order of the files and of the data within.
        twin: with a tied head, a tensor that the checkpoint holds for the head all the same, and the embedding's. They
            are compared; if they differ, the head gets a weight of its own, as in transformers.
        set_aside: records of the tensors that stay in the files.
        files_needed, files_skipped: shards, sorted.
    """

    parameters: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    twin: tuple[Entry, Entry] | None
    set_aside: tuple[TensorRecord, ...]
    files_needed: tuple[str, ...]
    files_skipped: tuple[str, ...]

    @property
    def bytes_to_read(self) -> int:
        """Bytes of the tensors that the steps copy."""
        return sum(step.entry.nbytes for step in self.steps)


def plan_load(spec: ModelSpec, layers: LayerPlan, names: NameTable, checkpoint: Checkpoint) -> LoadPlan:
    """Plan the load of these layers; reads headers only, and only those of the shards needed.

    Args:
        spec, layers: of the model.
        names: of its family.
        checkpoint: that is loaded.

    Raises:
        WeightsRefused: tensors are missing, unexpected, or of another shape or dtype than the model needs.
        CheckpointBroken: a needed shard is missing or damaged.
    """
    names = names.of(checkpoint.files)
    parameters = tuple(_wanted(spec, layers, names, checkpoint.files))
    needed = [source for parameter in parameters for source in parameter.sources]
    twin_names = _twin_names(spec, names, checkpoint.files)
    taken = {source.name for source in needed} | set(twin_names)
    set_aside, unexpected = _classify(spec, names, checkpoint.files, taken)
    missing = [source.name for source in needed if source.name not in checkpoint.files]
    if missing or unexpected:
        raise WeightsRefused(checkpoint.folder, missing=missing, unexpected=unexpected)
    entries = checkpoint.entries(sorted(taken))
    expected = {source.name: source for source in needed}
    if twin_names:
        expected |= {source.name: source for source in head_parameter(spec, names).sources}
    faults = [fault for name in sorted(taken) if (fault := _fault(expected[name], entries[name]))]
    if faults:
        raise WeightsRefused(checkpoint.folder, mismatched=faults)
    files = {entry.file for entry in entries.values()}
    return LoadPlan(
        parameters=parameters,
        steps=tuple(sorted(_steps(parameters, entries), key=_place)),
        twin=(entries[twin_names[0]], entries[twin_names[1]]) if twin_names else None,
        set_aside=tuple(set_aside),
        files_needed=tuple(sorted(files)),
        files_skipped=tuple(file for file in checkpoint.shards if file not in files),
    )


def with_own_head(plan: LoadPlan, spec: ModelSpec, names: NameTable) -> LoadPlan:
    """The plan for a head that turned out to differ from the embedding."""
    assert plan.twin is not None
    head = head_parameter(spec, structs.replace(names, head=plan.twin[0].name))
    steps = (*plan.steps, Step(plan.twin[0], head, 0))
    return structs.replace(plan, parameters=(*plan.parameters, head), steps=tuple(sorted(steps, key=_place)), twin=None)


def _wanted(spec: ModelSpec, layers: LayerPlan, names: NameTable, files: Mapping[str, str]) -> Iterator[Parameter]:
    for parameter in outer_parameters(spec, names):
        swapped = parameter.name == EMBEDDING and spec.tie and names.embedding not in files and names.head in files
        if swapped:
            # A tied pair may be saved under either name.
            yield structs.replace(parameter, sources=(Source(names.head, parameter.shape),))
        else:
            yield parameter
    yield from block_parameters(spec, layers, names)


def _twin_names(spec: ModelSpec, names: NameTable, files: Mapping[str, str]) -> tuple[str, ...]:
    both = spec.tie and names.head in files and names.embedding in files
    return (names.head, names.embedding) if both else ()


def _classify(
    spec: ModelSpec, names: NameTable, files: Mapping[str, str], taken: set[str]
) -> tuple[list[TensorRecord], list[str]]:
    """Records of the tensors that are not taken, and the names that nothing accounts for."""
    every_block = block_parameters(spec, plan_layers(spec), names)
    known = {source.name for parameter in every_block for source in parameter.sources}
    set_aside: list[TensorRecord] = []
    unexpected: list[str] = []
    for name in sorted(files.keys() - taken):
        if name in known:
            set_aside.append(TensorRecord(name, "skipped_by_plan", [name], files[name]))
        elif rule := _rule(spec, names, name):
            set_aside.append(TensorRecord(name, "ignored_by_rule", [name], files[name], rule=rule))
        else:
            unexpected.append(name)
    return set_aside, unexpected


def _rule(spec: ModelSpec, names: NameTable, tensor: str) -> str | None:
    if rule := names.rule_of(tensor):
        return rule.reason
    first = len(spec.layers)
    mtp = (names.block.format(source=source) for source in range(first, first + spec.mtp_layers))
    return MTP_RULE if any(tensor.startswith(prefix) for prefix in mtp) else None


def _fault(source: Source, entry: Entry) -> str | None:
    if entry.dtype not in DTYPES:
        return f"{entry.name} of dtype {entry.dtype}, not {', '.join(DTYPES)}"
    if entry.shape != source.shape:
        return f"{entry.name} of shape {list(entry.shape)}, not {list(source.shape)}"
    return None


def _steps(parameters: tuple[Parameter, ...], entries: Mapping[str, Entry]) -> Iterator[Step]:
    for parameter in parameters:
        offset = 0
        for source in parameter.sources:
            yield Step(entries[source.name], parameter, offset)
            offset += source.shape[0]


def _place(step: Step) -> tuple[str, int]:
    return step.entry.file, step.entry.begin
