"""`tercet cut SRC OUT --layers ...`: some blocks of a checkpoint as a checkpoint of its own."""

from __future__ import annotations

import argparse
from typing import Any, Final

from frontend.cli.tool import hand_over

MODULE: Final = "model_executor.tools.cut"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet cut` for the list of commands; the program itself knows its flags."""
    subparsers.add_parser("cut", help="write a checkpoint of some blocks of another", add_help=False)


def run(args: argparse.Namespace) -> int:
    """Run the program without flags, which tells what it needs."""
    del args
    hand_over(MODULE, [])
