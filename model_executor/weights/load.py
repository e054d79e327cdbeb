"""Fills a model with the tensors of a checkpoint: one pass over the files, with a buffer of bounded size."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from engine_core.wire.reports import LoadReport, Phase
from model_executor import device
from model_executor.errors import CheckpointBroken, WeightsRefused
from model_executor.models.decoder import Decoder
from model_executor.models.registry import family
from model_executor.models.spec import ModelSpec
from model_executor.weights.header import Entry
from model_executor.weights.index import Checkpoint
from model_executor.weights.layer_plan import LayerPlan
from model_executor.weights.page_cache import resident_share
from model_executor.weights.place import dtype_of, place, rows_at_once, targets
from model_executor.weights.plan import DTYPES, LoadPlan, Step, plan_load, with_own_head
from model_executor.weights.report import count_states, loaded_records

Progress = Callable[[Phase, int, int, Literal["bytes", "steps"]], None]
"""Takes phase, done, total, unit."""

BUFFER_BYTES: Final = 16 * 2**20


def load_weights(
    model: Decoder,
    spec: ModelSpec,
    plan: LayerPlan,
    model_dir: Path,
    progress: Progress,
    *,
    rounded: torch.dtype | None = None,
) -> LoadReport:
    """Load the plan's layers and what stands outside of the blocks.

    Memory beyond the parameters: a buffer of BUFFER_BYTES (or one row, if that is larger) and its converted copy.

    Args:
        model: as built for this spec and plan; if the checkpoint holds a head that differs from the embedding it was
            to be tied to, the model is untied.
        spec, plan: of the model.
        model_dir: the model folder.
        progress: called with phase "plan" once and with phase "load" as bytes are read.
        rounded: what weights are rounded to that may be narrower than the model computes; None: they are not.

    Raises:
        CheckpointBroken: a file is missing or damaged.
        WeightsRefused: tensors are missing, unexpected, mismatched or not finite.
    """
    began = time.monotonic()
    names = family(spec.architecture).names
    checkpoint = Checkpoint.open(model_dir)
    load = plan_load(spec, plan, names, checkpoint)
    progress("plan", 1, 1, "steps")
    planned = time.monotonic()
    page_cache = resident_share(_ranges(checkpoint, load))
    compared = 0
    if load.twin is not None:
        equal, compared = _equal(checkpoint, *load.twin)
        if not equal:
            model.untie()
            load = with_own_head(load, spec, names)
    _copy_all(checkpoint, load, targets(model, load.parameters), rounded, progress)
    dtype = dtype_of(model)
    records = loaded_records(load, dtype, tied=model.tied)
    return LoadReport(
        model=str(model_dir),
        revision=checkpoint.revision,
        layer_map=list(plan.sources),
        tensors=records,
        shards_opened=list(load.files_needed),
        shards_skipped=list(load.files_skipped),
        bytes_read=load.bytes_to_read + compared,
        bytes_materialized=sum(record.nbytes for record in records),
        counts=count_states(records),
        page_cache=page_cache,
        seconds={"plan": planned - began, "read": time.monotonic() - planned},
        classes=list(plan.classes),
    )


def _ranges(checkpoint: Checkpoint, load: LoadPlan) -> Mapping[Path, list[tuple[int, int]]]:
    ranges: dict[Path, list[tuple[int, int]]] = {}
    for step in load.steps:
        ranges.setdefault(checkpoint.path(step.entry.file), []).append((step.entry.begin, step.entry.end))
    return ranges


def _copy_all(
    checkpoint: Checkpoint,
    load: LoadPlan,
    into: Mapping[str, Tensor],
    rounded: torch.dtype | None,
    progress: Progress,
) -> None:
    done, total = 0, load.bytes_to_read
    progress("load", 0, total, "bytes")
    buffer = Buffer()
    for file, steps in groupby(load.steps, key=lambda step: step.entry.file):
        with closing(Shard(checkpoint.path(file), buffer)) as shard:
            for step in steps:
                narrow = rounded if step.parameter.dtype is None else None
                for read in _copy(shard, step, into[step.parameter.name], narrow, checkpoint.folder):
                    done += read
                    progress("load", done, total, "bytes")


def _copy(shard: Shard, step: Step, target: Tensor, rounded: torch.dtype | None, folder: Path) -> Iterator[int]:
    """Copy one tensor; gives the bytes of each portion."""
    first = step.offset
    for rows in shard.rows(step.entry):
        if not place(target, rows, first, transposed=step.parameter.transposed, rounded=rounded):
            dtype = str(rounded or target.dtype).removeprefix("torch.")
            fault = f"{step.entry.name} holds values that are not finite in {dtype}"
            raise WeightsRefused(folder, mismatched=[fault])
        first += rows.shape[0]
        yield rows.nbytes


def _equal(checkpoint: Checkpoint, one: Entry, other: Entry) -> tuple[bool, int]:
    """Whether two tensors hold the same bytes, and how many were read to find out."""
    read = 0
    if one.dtype != other.dtype:
        return False, read
    with (
        closing(Shard(checkpoint.path(one.file), Buffer())) as first,
        closing(Shard(checkpoint.path(other.file), Buffer())) as second,
    ):
        for mine, theirs in zip(first.rows(one), second.rows(other), strict=True):
            read += mine.nbytes + theirs.nbytes
            if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
                return False, read
    return True, read


class Buffer:
    """Memory that every read reuses."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def first(self, count: int) -> Tensor:
        """Its first bytes; uint8 [count]. What it held before is lost."""
        if self._bytes.numel() < count:
            self._bytes = torch.empty(count, dtype=torch.uint8)
        return self._bytes[:count]


class Shard:
    """A safetensors file that is being read.

    Args:
        path: the file.
        buffer: where its bytes go.
    """

    def __init__(self, path: Path, buffer: Buffer) -> None:
        self._path = path
        self._buffer = buffer
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointBroken(path, error.strerror or "cannot be read") from error

    def rows(self, entry: Entry) -> Iterator[Tensor]:
        """The tensor in portions of whole rows; each is valid until the next is asked for."""
        dtype = device.DTYPES[DTYPES[entry.dtype]]
        portion = rows_at_once(entry.shape, dtype.itemsize, BUFFER_BYTES)
        row_bytes = entry.nbytes // entry.shape[0]
        for first in range(0, entry.shape[0], portion):
            count = min(portion, entry.shape[0] - first)
            raw = self._read(entry.begin + first * row_bytes, count * row_bytes)
            yield raw.view(dtype).view(count, *entry.shape[1:])

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _read(self, begin: int, count: int) -> Tensor:
        raw = self._buffer.first(count)
        view = memoryview(raw.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer
        done = 0
        while done < count:
            try:
                read = os.preadv(self._descriptor, [view[done:]], begin + done)
            except OSError as error:
                raise CheckpointBroken(self._path, error.strerror or "cannot be read") from error
            if read == 0:
                raise CheckpointBroken(self._path, f"ends at byte {begin + done}, cut while it was read")
            done += read
        return raw
