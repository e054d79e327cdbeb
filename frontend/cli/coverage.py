"""`tercet coverage MODEL_DIR`: whether every operator of a plan runs in the real server, in every kind of step."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from frontend.errors import EXIT_FAILED


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet coverage`."""
    from frontend.proof.options import add_model_flags

    parser = subparsers.add_parser(
        "coverage",
        help="show that every operator of a choice of blocks runs in the real server",
        description="Start the real server under torch's profiler, send requests that trigger every path, and list "
        "each operator by class of blocks and kind of step. Exit codes: 0 all ran; 1 something did not; 2 a flag is "
        "wrong; 3 the model is refused; 4 the server failed.",
        allow_abbrev=False,
    )
    add_model_flags(parser)
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON too")


def run(args: argparse.Namespace) -> int:
    """Do it; gives the exit code."""
    from frontend.proof.coverage import lines
    from frontend.proof.options import layer_flags, precision_flags, write_report
    from frontend.proof.run_coverage import cover
    from frontend.tokenizer.load import load_tokenizer

    model = Path(args.model)
    vocab = load_tokenizer(model).vocab_size
    report = cover(model, layer_flags(args), precision_flags(args), vocab).report
    if args.json:
        write_report(Path(args.json), report)
    sys.stdout.write("\n".join(lines(report)) + "\n")
    return EXIT_FAILED if report.failures else 0
