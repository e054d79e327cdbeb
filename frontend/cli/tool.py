"""Hands a command over to a program of another package, which takes this process's place.

The frontend imports no model code; a program that needs it is started as what it is, with its own flags and exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from msgspec import Struct


class Tool(Struct, frozen=True):
    """A command that is a program of its own, as the list of commands has it.

    Attributes:
        name: of the command.
        module: of the program.
        does: its line in the list.
    """

    name: str
    module: str
    does: str

    def add_parser(self, subparsers: argparse._SubParsersAction[Any]) -> None:
        """Declare the command; the program itself knows its flags."""
        subparsers.add_parser(self.name, help=self.does, add_help=False)

    def run(self, args: argparse.Namespace) -> int:
        """Run the program without flags, which tells what it needs."""
        del args
        self.take_over([])

    def take_over(self, words: Sequence[str]) -> NoReturn:
        """Become `python -m MODULE WORDS`.

        Raises:
            OSError: Python cannot be started.
        """
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(sys.executable, [sys.executable, "-m", self.module, *words])  # noqa: S606 - no shell is wanted


PLAN: Final = Tool(
    "plan", "model_executor.tools.plan", "show what a choice of blocks needs: classes, files, bytes, operators"
)
CUT: Final = Tool("cut", "model_executor.tools.cut", "write a checkpoint of some blocks of another")
PARITY: Final = Tool(
    "parity", "model_executor.tools.parity", "compare tokens and errors of each block with transformers"
)
BENCH: Final = Tool("bench", "bench", "measure a server, its parts, and peers beside it")
