"""Flags that benchmarks share, and what all of them do with a result."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.prompts import Shape
from bench.record import Record, write_record
from bench.table import table


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Declare where results go."""
    parser.add_argument(
        "--result-file", metavar="FILE", type=Path, help="write a run record: result, samples, evidence"
    )
    parser.add_argument("--json", action="store_true", help="print each result as a line of JSON instead of a table")


def add_serve_flag(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Declare our own server."""
    parser.add_argument(
        "--serve",
        metavar="ARGS",
        required=required,
        default=None if required else "",
        help="arguments of `tercet serve` for the server that is started: MODEL_DIR and flags, in one word "
        "(default: the default model of a source tree)",
    )


def add_shape_flags(parser: argparse.ArgumentParser, shape: Shape) -> None:
    """Declare the sizes of random requests, with these defaults."""
    flags = {
        "--random-input-len": (shape.input_len, "tokens of a prompt"),
        "--random-output-len": (shape.output_len, "tokens of an answer, exactly: no token ends it"),
        "--random-prefix-len": (shape.prefix_len, "further tokens in front that are the same in all prompts"),
        "--vocab": (shape.vocab, "ids are drawn below this"),
    }
    for flag, (default, text) in flags.items():
        parser.add_argument(flag, metavar="N", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument(
        *("--random-range-ratio",),
        metavar="R",
        type=float,
        default=shape.range_ratio,
        help="lengths are drawn between (1 - R) and (1 + R) times the length (default: 0)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=1, help="of prompts and arrivals (default: 1)")


def shape_of(args: argparse.Namespace) -> Shape:
    """The sizes that were given.

    Raises:
        UsageError: one is out of its range.
    """
    shape = Shape(
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        prefix_len=args.random_prefix_len,
        range_ratio=args.random_range_ratio,
        vocab=args.vocab,
    )
    shape.check()
    return shape


def settings(args: argparse.Namespace) -> dict[str, object]:
    """All flags as they were given or stand by default, for a record."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in sorted(vars(args).items())
        if name != "words" and isinstance(value, str | int | float | list | tuple | Path | type(None))
    }


def command_line(args: argparse.Namespace) -> list[str]:
    """This command as a user types it."""
    return ["tercet", "bench", *args.words]


def deliver(args: argparse.Namespace, record: Record, titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a result and write its record, as the flags say.

    Raises:
        UsageError: the record cannot be written.
    """
    if args.json:
        for result in record.results:
            print(json.dumps(result))
    else:
        print(table(titles, rows))
    sys.stdout.flush()
    if args.result_file is not None:
        write_record(record, args.result_file)


def columns(results: Sequence[dict[str, object]], names: Sequence[str]) -> list[list[object]]:
    """Rows of a table out of results."""
    return [[_short(result.get(name, "")) for name in names] for result in results]


def _short(value: object) -> object:
    if not isinstance(value, float):
        return value
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
