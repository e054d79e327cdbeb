"""`tercet quality MODEL_DIR`: how far a served configuration is from float32 on real text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from frontend.errors import EXIT_FAILED

MOST_TOKENS: Final = 1_000_000


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet quality`."""
    from frontend.proof.options import add_model_flags

    parser = subparsers.add_parser(
        "quality",
        help="measure a dtype or a quantization against float32 on real text",
        description="Run a configuration and float32 over the same text, both as they are served, and compare their "
        "perplexity, distributions and likeliest tokens. Exit codes: 0 pass; 1 fail; 2 a flag is wrong; 3 the model or "
        "the configuration is refused.",
        allow_abbrev=False,
    )
    add_model_flags(parser)
    parser.add_argument("--text", metavar="FILE", help="in UTF-8; default: the language reference in this Python")
    parser.add_argument("--tokens", metavar="N", type=_count, default=1536, help="of the text (default: 1536)")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON too")


def run(args: argparse.Namespace) -> int:
    """Do it; gives the exit code."""
    from frontend.proof.options import model_flags, write_report
    from frontend.proof.passage import read_passage
    from frontend.proof.quality import lines, run_quality

    model = Path(args.model)
    passage = read_passage(model, None if args.text is None else Path(args.text), args.tokens)
    report = run_quality(model, model_flags(args), passage)
    if args.json:
        write_report(Path(args.json), report)
    sys.stdout.write("\n".join(lines(report)) + "\n")
    return EXIT_FAILED if report.failures else 0


def _count(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 2 to {MOST_TOKENS}")
    return int(text)
