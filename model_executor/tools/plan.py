"""`python -m model_executor.tools.plan MODEL [--layers ...] [--json]`: what a choice of blocks needs.

It reads config.json, the index, and the headers of those weight files that are there. Weight files may be missing, or
end after their header: sizes then follow from the structure, and the answer says so. Of quantized weights it tells what
they take on disk, as they are stored.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from model_executor.models.spec import Dtype, ModelSpec
from model_executor.tools.command import Parser, add_layer_flags, run_tool
from model_executor.tools.model import OpenModel, open_model
from model_executor.tools.operators import REQUESTS, block_operators, outer_operators, special_requests
from model_executor.tools.table import megabytes, table
from model_executor.weights.footprint import Footprint
from model_executor.weights.index import Checkpoint
from model_executor.weights.inventory import files_of, take_stock
from model_executor.weights.layer_plan import LayerPlan, block_classes, compact, missing_classes
from model_executor.weights.parameters import Parameter
from model_executor.weights.plan import DTYPES, plan_load
from model_executor.weights.report import ITEM_BYTES, parameter_bytes

# Ends the names of the scales of weights in 8 bits.
SCALES: Final = "_scale_inv"


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
        bytes_to_read: of the plan's tensors; None: the files that would tell are absent, and the way in which the
            weights are quantized is not known here.
        stored: these bytes by the dtype they are stored in, as safetensors calls it; of files that are there.
        estimated: whether bytes_to_read follows in part from the structure.
        ignored: tensors that no plan reads: how many, by reason.
    """

    needed: tuple[str, ...]
    absent: tuple[str, ...]
    not_needed: tuple[str, ...]
    bytes_to_read: int | None
    stored: Mapping[str, int]
    estimated: bool
    ignored: Mapping[str, int]


class KvRow(Struct, frozen=True):
    """Runtime layers whose cache keeps a token equally long: one KV group of the server.

    Attributes:
        window: tokens that they look back on; a sequence keeps little more than these in the cache. None: all.
        layers: how many.
        bytes_per_token: of all of them together, by dtype.
    """

    window: int | None
    layers: int
    bytes_per_token: Mapping[Dtype, int]


class PlanReport(Struct, frozen=True):
    """What a choice of blocks needs.

    Attributes:
        model: the folder; architecture: as config.json names it.
        revision: of the checkpoint; None: the folder holds no weights.
        quantization: what says that weights are quantized, and how; None: nothing does.
        blocks: of the checkpoint; prediction_blocks: behind them (MTP), which do not run.
        layers: the choice as it was made; layer_map: source index of each runtime layer.
        classes: of the blocks; left_out: names of the classes of which no block is chosen.
        shards: weight files; None: the folder holds none.
        memory_bytes: of the weights, by the dtype computed in; of quantized ones, once they are plain.
        products: what `--quantization` makes of the products: "none" or "int8".
        cpu_bytes: what the executor keeps of the weights on a CPU, where it has its native kernels, likewise by dtype.
        kv_bytes_per_token: of all runtime layers, by dtype; kv_groups: the same by how long a token is kept.
        outer_operators: outside the blocks.
        phases: each phase, and the request that makes every operator run in it.
    """

    model: str
    architecture: str
    revision: str | None
    quantization: str | None
    blocks: int
    prediction_blocks: int
    layers: str
    layer_map: tuple[int, ...]
    classes: tuple[ClassRow, ...]
    left_out: tuple[str, ...]
    shards: Shards | None
    memory_bytes: Mapping[Dtype, int]
    products: str
    cpu_bytes: Mapping[Dtype, int]
    kv_bytes_per_token: Mapping[Dtype, int]
    kv_groups: tuple[KvRow, ...]
    outer_operators: tuple[str, ...]
    phases: Mapping[str, str]


def make_report(
    model: OpenModel, layers: str, *, allow_missing_classes: bool, products: Literal["none", "int8"] = "none"
) -> PlanReport:
    """Plan and count.

    Raises:
        ModelRefused: the choice, the checkpoint or its products in int8 cannot be honoured.
    """
    spec = model.spec
    plan = model.plan(layers, allow_missing_classes=allow_missing_classes)
    parameters = model.parameters(plan)
    kept = sum(layer.attention.kv_elements for layer in plan.layers(spec))
    shards = None if model.checkpoint is None else _shards(model, model.checkpoint, plan, parameters)
    footprint = Footprint(spec, plan, parameters, _stored(model))
    return PlanReport(
        model=str(model.config.path.parent),
        architecture=spec.architecture,
        revision=None if model.checkpoint is None else model.checkpoint.revision,
        quantization=model.quantization,
        blocks=len(spec.layers),
        prediction_blocks=spec.mtp_layers,
        layers=layers,
        layer_map=plan.sources,
        classes=_rows(model, plan),
        left_out=tuple(each.name for each in missing_classes(spec, plan)),
        shards=shards,
        memory_bytes={dtype: parameter_bytes(parameters, dtype) for dtype in DTYPES.values()},
        products=products,
        cpu_bytes={dtype: footprint.bytes(dtype, int8=products == "int8") for dtype in DTYPES.values()},
        kv_bytes_per_token=_by_dtype(kept),
        kv_groups=_kv_groups(spec, plan),
        outer_operators=outer_operators(spec),
        phases=REQUESTS,
    )


def _by_dtype(elements: int) -> dict[Dtype, int]:
    return {dtype: elements * size for dtype, size in ITEM_BYTES.items()}


def _kv_groups(spec: ModelSpec, plan: LayerPlan) -> tuple[KvRow, ...]:
    """As the cache groups them: a window that no sequence outgrows is none."""
    kept: dict[int | None, list[int]] = {}
    for layer in plan.layers(spec):
        window = layer.attention.window
        reach = window if window is not None and window < spec.max_model_len else None
        kept.setdefault(reach, []).append(layer.attention.kv_elements)
    windows = sorted(kept, key=lambda window: window or 0)
    return tuple(KvRow(window, len(kept[window]), _by_dtype(sum(kept[window]))) for window in windows)


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
    stock = take_stock(model.spec, model.names, checkpoint)
    wanted = stock.of(plan.sources)
    needed = files_of(checkpoint, wanted)
    readable = {file for file in needed if checkpoint.path(file).is_file()}
    if model.quantization is None and readable == set(needed):
        # All headers are there: what the server would refuse is refused here.
        plan_load(model.spec, plan, model.names, checkpoint)
    entries = checkpoint.entries(name for name in wanted if checkpoint.files[name] in readable)
    stored: Counter[str] = Counter()
    for entry in entries.values():
        stored[entry.dtype] += entry.nbytes
    sizes = {name: entry.nbytes for name, entry in entries.items()}
    known = {source.name: (source.shape, each.dtype) for each in parameters for source in each.sources}
    known.setdefault(model.names.head, ((model.spec.vocab_size, model.spec.hidden_size), None))
    reckoned = [sizes[name] if name in sizes else _reckoned(model, known, name) for name in wanted]
    return Shards(
        needed=needed,
        absent=tuple(file for file in needed if file not in readable or checkpoint.is_cut(file)),
        not_needed=tuple(file for file in checkpoint.shards if file not in needed),
        bytes_to_read=None if None in reckoned else sum(size for size in reckoned if size is not None),
        stored=dict(sorted(stored.items())),
        estimated=len(sizes) < len(wanted),
        ignored=dict(Counter([*stock.ignored.values(), *stock.other_parts.values()])),
    )


def _stored(model: OpenModel) -> Callable[[str], Dtype | None]:
    """In which dtype a tensor is stored: by the headers that are there, else by config.json."""
    checkpoint = model.checkpoint
    if checkpoint is None:
        # Dummy weights are drawn in float32.
        return lambda _: None
    read = {name: entry for file in checkpoint.opened for name, entry in checkpoint.header(file).entries.items()}
    return lambda name: DTYPES.get(read[name].dtype, model.spec.dtype) if name in read else model.spec.dtype


def _reckoned(model: OpenModel, known: Mapping[str, tuple[tuple[int, ...], Dtype | None]], name: str) -> int | None:
    """Bytes of a tensor whose header is not there, from its shape; None: nobody knows.

    Weights in 8 bits with a scale for each block of numbers have their scales beside them, in float32.
    """
    shape, own = known.get(name.removesuffix(SCALES), (None, None))
    if shape is None or model.spec.dtype is None:
        return None
    # Matrices are saved in the checkpoint's dtype, whatever they are computed in.
    plain = prod(shape) * ITEM_BYTES[own if own is not None and len(shape) == 1 else model.spec.dtype]
    if model.quantization is None:
        return plain
    quantization = model.config.section("quantization_config")
    block = () if quantization is None else quantization.indices("weight_block_size")
    if len(block) != 2 or 0 in block:
        return None
    if name.endswith(SCALES):
        if len(shape) != 2:
            return None
        return prod(-(-size // side) for size, side in zip(shape, block, strict=True)) * ITEM_BYTES["float32"]
    assert model.checkpoint is not None
    return prod(shape) if f"{name}{SCALES}" in model.checkpoint.files else plain


def lines(report: PlanReport) -> list[str]:
    """The report for people."""
    in_int8 = "" if report.products == "none" else f", products in {report.products}"
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
        *_shard_lines(report),
        *([] if in_int8 else [_size_line("weights on CUDA", report.memory_bytes)]),
        _size_line(f"weights on the CPU{in_int8}", report.cpu_bytes),
        _size_line("KV cache for each token", report.kv_bytes_per_token),
        *(map(_kv_line, report.kv_groups) if any(row.window for row in report.kv_groups) else ()),
        "",
        f"operators outside the blocks: {'; '.join(report.outer_operators)}",
    ]
    for row in report.classes:
        text.append(f"operators of {row.name}: {'; '.join(row.operators)}")
        text += [f"  its special path needs {request}" for request in row.requests]
    return text + [f"phase {phase}: {request}" for phase, request in report.phases.items()]


def _shard_lines(report: PlanReport) -> list[str]:
    shards, quantized = report.shards, []
    if report.quantization is not None:
        refused = f"weights quantized by {report.quantization} are not supported, tercet serve refuses the folder"
        quantized = [f"{refused}; sizes in memory are those of plain weights"]
    if shards is None:
        return quantized or ["no weights here: the folder serves --load-format dummy alone"]
    size = "unknown until the files are there" if shards.bytes_to_read is None else megabytes(shards.bytes_to_read)
    stored = ", ".join(f"{megabytes(size)} of {dtype}" for dtype, size in shards.stored.items())
    return [
        f"weight files needed: {len(shards.needed)}, not needed: {len(shards.not_needed)}",
        f"bytes to read: {size}" + (", in part reckoned from the structure" if shards.estimated else ""),
        *([f"  as they are stored: {stored}"] if len(shards.stored) > 1 or shards.estimated else []),
        *(f"  needed: {file}" + (" (not complete here)" * (file in shards.absent)) for file in shards.needed),
        *(f"never read: {count} tensors: {reason}" for reason, count in shards.ignored.items()),
        *quantized,
    ]


def _size_line(what: str, sizes: Mapping[Dtype, int]) -> str:
    return f"{what}: {', '.join(f'{megabytes(size)} in {dtype}' for dtype, size in sizes.items())}"


def _kv_line(row: KvRow) -> str:
    kept = "keep every token" if row.window is None else f"keep the last {row.window} tokens and what a step adds"
    return "  " + _size_line(f"{row.layers} blocks that {kept}", row.bytes_per_token)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; gives the exit status."""
    parser = Parser(prog="tercet plan", description="Show what a choice of blocks needs, before any weights are read.")
    parser.add_argument("model", metavar="MODEL_DIR", help="folder with config.json; weight files may be missing")
    add_layer_flags(parser, "full")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none", help="of products (default: none)")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def act(arguments: Sequence[str]) -> None:
        args = parser.parse_args(arguments)
        model = open_model(Path(args.model), cut=True)
        missing, products = args.allow_missing_classes, args.quantization
        report = make_report(model, args.layers, allow_missing_classes=missing, products=products)
        text = msgspec.json.format(msgspec.json.encode(report)).decode() if args.json else "\n".join(lines(report))
        sys.stdout.write(f"{text}\n")

    return run_tool("tercet plan", act, argv)


if __name__ == "__main__":
    sys.exit(main())
