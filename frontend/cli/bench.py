"""`tercet bench`: measurements of servers and of their parts."""

from __future__ import annotations

import argparse
from typing import Any, Final

from frontend.cli.tool import hand_over

MODULE: Final = "bench"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet bench` for the list of commands; the program itself knows its flags."""
    subparsers.add_parser("bench", help="measure a server, its parts, and peers beside it", add_help=False)


def run(args: argparse.Namespace) -> int:
    """Run the program without flags, which lists the benchmarks."""
    del args
    hand_over(MODULE, [])
