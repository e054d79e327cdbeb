"""The `tercet` command: finds the subcommand and turns errors into one line and an exit code.

Exit codes: 0 done; 2 a flag, a value, a file or an address is wrong; 3 the model or the configuration cannot be
honoured; 4 the engine failed while the server ran; 130 Ctrl-C before the server was up.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn, Protocol, cast

from frontend.cli.options import nearest
from frontend.cli.tool import BENCH, CUT, PARITY, PLAN, Tool
from frontend.cli.version import package_version
from frontend.errors import EXIT_ENGINE, FrontendError, StartError, UsageError

PROG: Final = "tercet"
EXIT_INTERRUPTED: Final = 130

# Name -> module, which is imported when its command is used or help is asked for; or the program of another package.
COMMANDS: Final[Mapping[str, str | Tool]] = {
    "serve": "frontend.cli.serve",
    "chat": "frontend.cli.chat",
    "plan": PLAN,
    "cut": CUT,
    "parity": PARITY,
    "quality": "frontend.cli.quality",
    "coverage": "frontend.cli.coverage",
    "sentinel": "frontend.cli.sentinel",
    "report": "frontend.cli.report",
    "bench": BENCH,
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions of one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UsageError(f"{self.prog}: {message.removeprefix('argument ')}")


class Command(Protocol):
    """What a subcommand has, module or Tool."""

    def add_parser(self, subparsers: argparse._SubParsersAction[Parser]) -> None:
        """Declare the flags; the name is the key of COMMANDS."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; gives the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tercet ARGV` and give its exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return _run(given)
    except FrontendError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, StartError) else EXIT_ENGINE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(given: list[str]) -> int:
    first = next((word for word in given if not word.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        raise UsageError(f"{PROG}: no command {first!r}{nearest(first, list(COMMANDS))}; known: {', '.join(COMMANDS)}")
    if first is not None and given[0] == first and isinstance(tool := COMMANDS[first], Tool):
        tool.take_over(given[1:])
    commands = {name: _command(name) for name in (COMMANDS if first is None else [first])}
    parser, subparsers = _parser()
    for command in commands.values():
        command.add_parser(subparsers)
    args, unknown = parser.parse_known_args(given)
    if args.command is None:
        parser.print_help()
        return 0
    if unknown:
        _refuse(args.command, unknown[0], subparsers.choices[args.command])
    return commands[args.command].run(args)


def _command(name: str) -> Command:
    found = COMMANDS[name]
    return found if isinstance(found, Tool) else cast("Command", importlib.import_module(found))


def _parser() -> tuple[Parser, argparse._SubParsersAction[Parser]]:
    parser = Parser(prog=PROG, description="An LLM inference server in three processes.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROG} {package_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    return parser, subparsers


def _refuse(command: str, word: str, parser: argparse.ArgumentParser) -> NoReturn:
    if not word.startswith("-"):
        raise UsageError(f"{PROG} {command}: too many arguments: {word!r}")
    flag = word.partition("=")[0]
    known = [name for action in parser._actions for name in action.option_strings]
    raise UsageError(f"{PROG} {command}: unknown flag {flag}{nearest(flag, known)}")
