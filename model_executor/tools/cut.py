"""`python -m model_executor.tools.cut SRC OUT --layers ...`: some blocks of a checkpoint as a checkpoint of its own."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from tqdm import tqdm

from model_executor.tools.command import Parser, add_layer_flags, run_tool
from model_executor.tools.cutter import SHARD_BYTES, Cut, CutOptions, check_output, plan_cut, write_cut
from model_executor.tools.model import open_model
from model_executor.tools.table import megabytes
from model_executor.weights.cut_assets import MARKDOWN
from model_executor.weights.cut_tensors import BUFFER_BYTES
from model_executor.weights.layer_plan import compact

_SIZE: Final = re.compile(r"([1-9][0-9]{0,14})(kB|KB|MB|GB)?")
_UNITS: Final = {None: 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; gives the exit status."""
    return run_tool("tercet cut", _cut, argv)


def _cut(argv: Sequence[str]) -> None:
    args = _parser().parse_args(argv)
    source, out = Path(args.source), Path(args.out)
    model = open_model(source, cut=args.mode == "dummy")
    cut = plan_cut(model, _options(args, source))
    free = check_output(source, out, cut)
    for line in budget(cut, free):
        _say(line)
    with tqdm(total=cut.bytes_to_copy, desc="copying", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        record = write_cut(cut, out, bar.update)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    _say(f"{out}: {len(record.tensors)} tensors in {len(cut.files)} files, {megabytes(written)} written in all")
    _say(f"{out / MARKDOWN} tells where they came from")


def budget(cut: Cut, free: int) -> list[str]:
    """What the cut will take and give, before anything is written."""
    spec = cut.model.spec
    elements = sum(prod(parameter.shape) for parameter in cut.model.parameters(cut.plan))
    text = [
        f"blocks: {compact(cut.plan.sources)} of 0-{len(spec.layers) - 1}, {len(cut.plan.sources)} in all",
        *(f"edit: {edit.field}: {edit.why}" for edit in cut.edits),
        *(f"left out: {count} tensors: {reason}" for reason, count in cut.left_out.items()),
        f"disk: {megabytes(cut.bytes_to_write)} to write, {megabytes(free)} free",
        f"memory: {megabytes(BUFFER_BYTES)} for the copy; to serve it, {megabytes(4 * elements)} of weights in float32",
    ]
    if spec.mtp_layers:
        text.append(f"prediction blocks (MTP): {cut.options.prediction}")
    return text


def _parser() -> Parser:
    parser = Parser(
        prog="tercet cut",
        description="Write a checkpoint of some blocks of another: embedding, these blocks, final norm and head under "
        "new names, a configuration that fits, and a record of where everything came from. The source stays as it is.",
    )
    parser.add_argument("source", metavar="SRC", help="model folder")
    parser.add_argument("out", metavar="OUT", help="folder to make; new or empty")
    add_layer_flags(parser, None)
    parser.add_argument(
        "--mode",
        choices=("weights", "dummy"),
        default="weights",
        help="dummy: configuration and assets alone, for --load-format dummy (default: weights)",
    )
    parser.add_argument(
        "--mtp",
        choices=("keep", "drop"),
        default="drop",
        help="blocks behind the last one that predict further tokens (default: drop)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=_size,
        default=SHARD_BYTES,
        help="bytes of tensors in one file, such as 500MB (default: 5GB)",
    )
    return parser


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return int(found[1]) * _UNITS[found[2]]


def _options(args: argparse.Namespace, source: Path) -> CutOptions:
    words = ["tercet", "cut", source.resolve().name, "OUT", "--layers", args.layers, "--mode", args.mode]
    words += ["--mtp", args.mtp, "--max-shard-size", str(args.max_shard_size)]
    if args.allow_missing_classes:
        words.append("--allow-missing-classes")
    return CutOptions(
        layers=args.layers,
        mode=args.mode,
        prediction=args.mtp,
        allow_missing_classes=args.allow_missing_classes,
        max_shard_bytes=args.max_shard_size,
        command=shlex.join(words),
    )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    # What was written so far is removed on the way out.
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
