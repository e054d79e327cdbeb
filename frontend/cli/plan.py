"""`tercet plan MODEL_DIR`: what a choice of blocks needs, shown before any weights are read."""

from __future__ import annotations

import argparse
from typing import Any, Final

from frontend.cli.tool import hand_over

MODULE: Final = "model_executor.tools.plan"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet plan` for the list of commands; the program itself knows its flags."""
    subparsers.add_parser(
        "plan", help="show what a choice of blocks needs: classes, files, bytes, operators", add_help=False
    )


def run(args: argparse.Namespace) -> int:
    """Run the program without flags, which tells what it needs."""
    del args
    hand_over(MODULE, [])
