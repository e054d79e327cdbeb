"""`tercet sentinel record|check FILE MODEL_DIR`: whether a plan still gives what it gave."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from frontend.errors import EXIT_FAILED


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet sentinel`."""
    from frontend.proof.options import add_model_flags

    parser = subparsers.add_parser(
        "sentinel",
        help="record what a choice of blocks gives, or check that it still does",
        description="Run a fixed pack of token sequences through the real server and through the plain-torch "
        "execution of the same plan, and record or compare tokens, log-probabilities and a digest of every weight. "
        "Exit codes: 0 recorded, or nothing differs; 1 something differs; 2 a flag is wrong, or the file is of another "
        "plan; 3 the model is refused; 4 the server failed.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("record", "check"), help="write the file, or compare with it")
    parser.add_argument("file", metavar="FILE", help="the sentinel")
    add_model_flags(parser)
    parser.add_argument("--socket", metavar="PATH", help="a running server of this model; default: one is started")


def run(args: argparse.Namespace) -> int:
    """Do it; gives the exit code."""
    return _record(args) if args.action == "record" else _check(args)


def _record(args: argparse.Namespace) -> int:
    from frontend.proof.options import model_flags, write_report
    from frontend.proof.run_sentinel import observe, run_reference
    from frontend.proof.sentinel import differences, lines

    model, flags = Path(args.model), model_flags(args)
    sentinel = observe(model, flags, run_reference(model, flags), _socket(args))
    # What is recorded must agree with itself, or it would be found to differ by the next check.
    faults = differences(sentinel, sentinel)
    sys.stdout.write("\n".join(lines(faults, sentinel)) + "\n")
    if faults:
        return EXIT_FAILED
    write_report(Path(args.file), sentinel)
    return 0


def _check(args: argparse.Namespace) -> int:
    from frontend.proof.options import model_flags
    from frontend.proof.run_sentinel import observe, run_reference
    from frontend.proof.sentinel import check_runs, differences, lines, read_sentinel

    recorded = read_sentinel(Path(args.file))
    model, flags = Path(args.model), model_flags(args)
    reference = run_reference(model, flags)
    check_runs(recorded.reference, reference)
    now = observe(model, flags, reference, _socket(args))
    faults = differences(recorded, now)
    sys.stdout.write("\n".join(lines(faults, now)) + "\n")
    return EXIT_FAILED if faults else 0


def _socket(args: argparse.Namespace) -> Path | None:
    return None if args.socket is None else Path(args.socket)
