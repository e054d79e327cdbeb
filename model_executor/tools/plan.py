"""`python -m model_executor.tools.plan MODEL [--layers ...] [--json]`: what a choice of blocks needs.

It reads config.json, the index, and the headers of those weight files that are there. Weight files may be missing, or
end after their header: sizes then follow from the structure, and the answer says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import msgspec
from msgspec import Struct

from model_executor.models.spec import Dtype
from model_executor.tools.command import Parser, add_layer_flags, run_tool
from model_executor.tools.model import OpenModel, open_model
from model_executor.tools.operators import REQUESTS, block_operators, outer_operators, special_requests
from model_executor.tools.table import megabytes, table
from model_executor.weights.index import Checkpoint
from model_executor.weights.inventory import files_of, take_stock
from model_executor.weights.layer_plan import LayerPlan, block_classes, compact, missing_classes
from model_executor.weights.parameters import Parameter, block_parameters, outer_parameters
from model_executor.weights.plan import plan_load
from model_executor.weights.report import ITEM_BYTES


class ClassRow(Struct, frozen=True):
    """One class of blocks.

    Attributes:
        name: of the class.
        count: blocks of it in the checkpoint.
        sources: these blocks, as `--layers` takes them.
        chosen: those that the plan holds.
        operators: that such a block runs.
        requests: that its special paths need, beside the phases.
        kv_elements: numbers that such a block keeps in the cache for each token.
    """

    name: str
    count: int
    sources: str
    chosen: str
    operators: tuple[str, ...]
    requests: tuple[str, ...]
    kv_elements: int


class Shards(Struct, frozen=True):
    """Weight files.

    Attributes:
        needed: those that hold a tensor of the plan.
        absent: those of them that are not there, or end before their data does.
        not_needed: the others.
        bytes_to_read: of the plan's tensors; None: the files that would tell are absent and the weights quantized.
        estimated: whether bytes_to_read follows in part from the structure.
    """

    needed: tuple[str, ...]
    absent: tuple[str, ...]
    not_needed: tuple[str, ...]
    bytes_to_read: int | None
    estimated: bool


class PlanReport(Struct, frozen=True):
    """What a choice of blocks needs.

    Attributes:
        model: the folder; architecture: as config.json names it.
        revision: of the checkpoint; None: the folder holds no weights.
        blocks: of the checkpoint; prediction_blocks: behind them (MTP), which do not run.
        layers: the choice as it was made; layer_map: source index of each runtime layer.
        classes: of the blocks; left_out: names of the classes of which no block is chosen.
        shards: weight files; None: the folder holds none.
        memory_bytes: of the weights, by the dtype computed in.
        kv_bytes_per_token: of all runtime layers, by dtype.
        outer_operators: outside the blocks.
        phases: each phase, and the request that makes every operator run in it.
    """

    model: str
    architecture: str
    revision: str | None
    blocks: int
    prediction_blocks: int
    layers: str
    layer_map: tuple[int, ...]
    classes: tuple[ClassRow, ...]
    left_out: tuple[str, ...]
    shards: Shards | None
    memory_bytes: Mapping[Dtype, int]
    kv_bytes_per_token: Mapping[Dtype, int]
    outer_operators: tuple[str, ...]
    phases: Mapping[str, str]


def make_report(model: OpenModel, layers: str, *, allow_missing_classes: bool) -> PlanReport:
    """Plan and count.

    Raises:
        ModelRefused: the choice or the checkpoint cannot be honoured.
    """
    spec = model.spec
    plan = model.plan(layers, allow_missing_classes=allow_missing_classes)
    names = model.family.names
    parameters = (*outer_parameters(spec, names), *block_parameters(spec, plan, names))
    elements = sum(prod(parameter.shape) for parameter in parameters)
    kept = sum(layer.attention.kv_elements for layer in plan.layers(spec))
    return PlanReport(
        model=str(model.config.path.parent),
        architecture=spec.architecture,
        revision=None if model.checkpoint is None else model.checkpoint.revision,
        blocks=len(spec.layers),
        prediction_blocks=spec.mtp_layers,
        layers=layers,
        layer_map=plan.sources,
        classes=_rows(model, plan),
        left_out=tuple(each.name for each in missing_classes(spec, plan)),
        shards=None if model.checkpoint is None else _shards(model, model.checkpoint, plan, parameters),
        memory_bytes={dtype: elements * size for dtype, size in ITEM_BYTES.items()},
        kv_bytes_per_token={dtype: kept * size for dtype, size in ITEM_BYTES.items()},
        outer_operators=outer_operators(spec),
        phases=REQUESTS,
    )


def _rows(model: OpenModel, plan: LayerPlan) -> tuple[ClassRow, ...]:
    rows = []
    for each in block_classes(model.spec):
        layer = model.spec.layers[each.sources[0]]
        rows.append(
            ClassRow(
                name=each.name,
                count=len(each.sources),
                sources=compact(each.sources),
                chosen=compact(source for source in plan.sources if source in each.sources),
                operators=block_operators(layer),
                requests=special_requests(layer),
                kv_elements=layer.attention.kv_elements,
            )
        )
    return tuple(rows)


def _shards(model: OpenModel, checkpoint: Checkpoint, plan: LayerPlan, parameters: Iterable[Parameter]) -> Shards:
    stock = take_stock(model.spec, model.family.names, checkpoint)
    wanted = stock.of(plan.sources)
    needed = files_of(checkpoint, wanted)
    readable = {file for file in needed if checkpoint.path(file).is_file()}
    if not model.quantized and readable == set(needed):
        # All headers are there: what the server would refuse is refused here.
        plan_load(model.spec, plan, model.family.names, checkpoint)
    sizes = {name: entry.nbytes for name, entry in checkpoint.entries(_in(wanted, checkpoint, readable)).items()}
    total, estimated = _total(model, wanted, sizes, parameters)
    return Shards(
        needed=needed,
        absent=tuple(file for file in needed if file not in readable or checkpoint.is_cut(file)),
        not_needed=tuple(file for file in checkpoint.shards if file not in needed),
        bytes_to_read=total,
        estimated=estimated,
    )


def _in(wanted: Iterable[str], checkpoint: Checkpoint, files: set[str]) -> list[str]:
    return [name for name in wanted if checkpoint.files[name] in files]


def _total(
    model: OpenModel, wanted: Sequence[str], sizes: Mapping[str, int], parameters: Iterable[Parameter]
) -> tuple[int | None, bool]:
    """Bytes of the wanted tensors, and whether any had to be reckoned from its shape."""
    if len(sizes) == len(wanted):
        return sum(sizes.values()), False
    dtype = model.spec.dtype
    if model.quantized or dtype is None:
        return None, True
    shapes = {source.name: source.shape for parameter in parameters for source in parameter.sources}
    head = model.family.names.head
    shapes.setdefault(head, (model.spec.vocab_size, model.spec.hidden_size))
    unknown = [name for name in wanted if name not in sizes and name not in shapes]
    if unknown:
        return None, True
    return sum(sizes[name] if name in sizes else prod(shapes[name]) * ITEM_BYTES[dtype] for name in wanted), True


def lines(report: PlanReport) -> list[str]:
    """The report for people."""
    text = [
        f"{report.model}: {report.architecture}, {report.blocks} blocks"
        + (
            f" and {report.prediction_blocks} that predict further tokens (MTP, not run)"
            * bool(report.prediction_blocks)
        ),
        "",
        *table(
            ("class", "count", "blocks", "chosen"),
            [(row.name, str(row.count), row.sources, row.chosen or "none") for row in report.classes],
        ),
        "",
        f"--layers {report.layers}: {len(report.layer_map)} of {report.blocks} blocks: {compact(report.layer_map)}",
        *[f"left out: every block of {name}" for name in report.left_out],
        "",
        *_shard_lines(report.shards),
        *_size_lines("weights in memory", report.memory_bytes),
        *_size_lines("KV cache for each token", report.kv_bytes_per_token),
        "",
        f"operators outside the blocks: {', '.join(report.outer_operators)}",
    ]
    for row in report.classes:
        text.append(f"operators of {row.name}: {', '.join(row.operators)}")
        text += [f"  its special path needs {request}" for request in row.requests]
    return text + [f"phase {phase}: {request}" for phase, request in report.phases.items()]


def _shard_lines(shards: Shards | None) -> list[str]:
    if shards is None:
        return ["no weights here: the folder serves --load-format dummy alone"]
    size = "unknown" if shards.bytes_to_read is None else megabytes(shards.bytes_to_read)
    return [
        f"weight files needed: {len(shards.needed)}, not needed: {len(shards.not_needed)}",
        f"bytes to read: {size}" + (", in part reckoned from the structure" if shards.estimated else ""),
        *(f"  needed: {file}" + (" (not complete here)" * (file in shards.absent)) for file in shards.needed),
    ]


def _size_lines(what: str, sizes: Mapping[Dtype, int]) -> list[str]:
    return [f"{what}: {', '.join(f'{megabytes(size)} in {dtype}' for dtype, size in sizes.items())}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; gives the exit status."""
    parser = Parser(prog="tercet plan", description="Show what a choice of blocks needs, before any weights are read.")
    parser.add_argument("model", metavar="MODEL_DIR", help="folder with config.json; weight files may be missing")
    add_layer_flags(parser, "full")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def act(arguments: Sequence[str]) -> None:
        args = parser.parse_args(arguments)
        model = open_model(Path(args.model), cut=True)
        report = make_report(model, args.layers, allow_missing_classes=args.allow_missing_classes)
        text = msgspec.json.format(msgspec.json.encode(report)).decode() if args.json else "\n".join(lines(report))
        sys.stdout.write(f"{text}\n")

    return run_tool("tercet plan", act, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
