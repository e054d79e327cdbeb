"""What the tools' command lines share: one line for an error, and the exit codes of `tercet`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from model_executor.errors import ModelRefused, ToolMisused
from model_executor.weights.layer_plan import FORMS

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_REFUSED: Final = 3
EXIT_INTERRUPTED: Final = 130


class Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions of one line, and which takes no abbreviated flag.

    Args:
        prog: the command as users type it.
        description: what it does.
    """

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ToolMisused(f"{self.prog}: {message.removeprefix('argument ')}")


def add_layer_flags(parser: argparse.ArgumentParser, default: str | None) -> None:
    """The flags that choose blocks; without a default they are required."""
    parser.add_argument(
        "--layers",
        metavar="CHOICE",
        default=default,
        required=default is None,
        help=f"blocks: {FORMS}" + (f" (default: {default})" if default else ""),
    )
    parser.add_argument(
        "--allow-missing-classes",
        action="store_true",
        help="take a choice of blocks that leaves a class of blocks out",
    )


def run_tool(name: str, act: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None) -> int:
    """Do it and give the exit code: 0 done, 2 a flag or value is wrong, 3 the model cannot be honoured.

    Args:
        name: of the command, for errors of the system.
        act: the program; it may give an exit code of its own.
        argv: its arguments; None: those of the process.
    """
    status = None
    try:
        status = act(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ToolMisused as error:
        return _failed(error, EXIT_USAGE)
    except ModelRefused as error:
        return _failed(error, EXIT_REFUSED)
    except OSError as error:
        return _failed(f"{name}: {error}", EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status or 0


def _failed(error: object, status: int) -> int:
    sys.stderr.write(f"error: {error}\n")
    return status
