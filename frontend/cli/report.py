"""`tercet report MODEL_DIR --out DIR`: every proof of a choice of blocks, in one report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from frontend.errors import EXIT_FAILED

SAMPLES: Final = 8


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet report`."""
    from frontend.proof.options import add_model_flags

    parser = subparsers.add_parser(
        "report",
        help="prove a choice of blocks in every way, and write one report",
        description="Run coverage, checks of the executor, parity, sentinel and a load through HTTP, and write "
        "report.md and report.json. Exit codes: 0 nothing failed; 1 something did; 2 a flag is wrong; 3 there is no "
        "such plan.",
        allow_abbrev=False,
    )
    add_model_flags(parser)
    parser.add_argument("--out", metavar="DIR", required=True, help="folder for report.md and report.json")
    parser.add_argument("--sentinel", metavar="FILE", help="compare with this file; default: with a second run")
    parser.add_argument(
        "--samples", metavar="N", type=int, default=SAMPLES, help=f"token sequences of the parity (default: {SAMPLES})"
    )


def run(args: argparse.Namespace) -> int:
    """Do it; gives the exit code."""
    from frontend.proof.options import layer_flags, precision_flags
    from frontend.proof.run_report import Reporter, Subject, write
    from frontend.tokenizer.load import load_tokenizer

    model = Path(args.model).expanduser().absolute()
    subject = Subject(
        model=model,
        layers=layer_flags(args),
        precision=precision_flags(args),
        samples=args.samples,
        vocab=load_tokenizer(model).vocab_size,
        sentinel=None if args.sentinel is None else Path(args.sentinel),
    )
    report = Reporter(subject, _say).run()
    write(report, Path(args.out), _say)
    return EXIT_FAILED if report.failures else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
