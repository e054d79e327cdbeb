"""`tercet parity MODEL_DIR`: the production path against a reference engine on the same checkpoint."""

from __future__ import annotations

import argparse
from typing import Any, Final

from frontend.cli.tool import hand_over

MODULE: Final = "model_executor.tools.parity"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet parity` for the list of commands; the program itself knows its flags."""
    subparsers.add_parser("parity", help="compare tokens and errors of each block with transformers", add_help=False)


def run(args: argparse.Namespace) -> int:
    """Run the program without flags, which tells what it needs."""
    del args
    hand_over(MODULE, [])
