"""The load report: what became of every tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Final

from engine_core.wire.reports import LoadReport, TensorRecord, TensorState, page_cache_state
from model_executor.models.spec import Dtype
from model_executor.weights.parameters import EMBEDDING, HEAD, Parameter
from model_executor.weights.plan import DTYPES, LoadPlan

ITEM_BYTES: Final[Mapping[Dtype, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


def loaded_records(plan: LoadPlan, dtype: Dtype, *, tied: bool) -> list[TensorRecord]:
    """A record of every parameter that a load filled, and of every tensor that it left in the files.

    Args:
        plan: as carried out.
        dtype: of the parameters.
        tied: whether the head is the embedding.
    """
    first = {step.parameter.name: step.entry for step in reversed(plan.steps) if step.offset == 0}
    records = []
    for parameter in plan.parameters:
        entry = first[parameter.name]
        state: TensorState = "fused" if len(parameter.sources) > 1 else "loaded"
        records.append(_record(parameter, state, dtype, entry.file, DTYPES[entry.dtype]))
    if tied:
        twin = [] if plan.twin is None else [plan.twin[0].name]
        table = first[EMBEDDING]
        records.append(TensorRecord(HEAD, "tied", [table.name, *twin], table.file, 0, DTYPES[table.dtype], dtype))
    return records + list(plan.set_aside)


def generated_records(parameters: Iterable[Parameter], dtype: Dtype) -> list[TensorRecord]:
    """A record of every parameter that was drawn instead of loaded."""
    return [_record(parameter, "generated", dtype) for parameter in parameters]


def count_states(records: Iterable[TensorRecord]) -> dict[TensorState, int]:
    """Records by state; the faults stand there with their zero."""
    found = Counter(record.state for record in records)
    return {**dict(found), "missing": found["missing"], "unexpected": found["unexpected"]}


def parameter_bytes(parameters: Iterable[Parameter], dtype: Dtype) -> int:
    """Bytes of parameters computed in a dtype, those with a dtype of their own in that."""
    return sum(prod(each.shape) * ITEM_BYTES[each.dtype or dtype] for each in parameters)


def load_table(report: LoadReport) -> list[str]:
    """The report for the log: a row for each state, for the blocks, the files and the bytes."""
    sizes: Counter[TensorState] = Counter()
    for record in report.tensors:
        sizes[record.state] += record.nbytes
    rows = [f"load report of {report.model}, revision {report.revision}"]
    rows += [f"  {state:<16} {count:>8} tensors {sizes[state]:>16} bytes" for state, count in report.counts.items()]
    placed = zip(report.layer_map, report.classes, strict=True)
    rows += [f"  block {index} <- source block {source}: {name}" for index, (source, name) in enumerate(placed)]
    rows.append(f"  files: {len(report.shards_opened)} opened, {len(report.shards_skipped)} not needed")
    rows.append(f"  bytes: {report.bytes_read} read, {report.bytes_materialized} in memory before kernels pack them")
    share = "" if report.page_cache is None else f", {report.page_cache:.0%} of the bytes read were in memory before"
    rows.append(f"  page cache: {page_cache_state(report.page_cache)}{share}")
    return rows


def _record(
    parameter: Parameter, state: TensorState, dtype: Dtype, file: str = "", source_dtype: str = ""
) -> TensorRecord:
    sources = [source.name for source in parameter.sources]
    nbytes = parameter_bytes([parameter], dtype)
    return TensorRecord(parameter.name, state, sources, file, nbytes, source_dtype, parameter.dtype or dtype)
