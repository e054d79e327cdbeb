"""`python -m bench`, or `tercet bench`: finds the benchmark, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from bench.errors import BenchError
from frontend.errors import FrontendError, StartError

PROG: Final = "tercet bench"
EXIT_INTERRUPTED: Final = 130
EXIT_FAILED: Final = 4

# Name -> (module, what it does). A module is imported when its benchmark runs.
COMMANDS: Final = {
    "serve": ("bench.serve", "a load on a server with OpenAI's endpoints: latencies, throughput, goodput"),
    "throughput": ("bench.throughput", "tokens a second of the engine, without HTTP, all requests at once"),
    "latency": ("bench.latency", "one batch through the engine: milliseconds a step and from end to end"),
    "startup": ("bench.startup", "seconds until a server is ready, and the memory of its processes"),
    "micro": ("bench.micro", "costs of wire, scheduler and block pool; kernels against what the machine can do"),
    "cost": ("bench.cost", "processor time of frontend and core a token, under an executor without a model"),
    "compare": ("bench.compare", "servers or commands in turn: ratios of their figures, with spread"),
    "ablate": ("bench.ablate", "the server with each of its options off, at equal budget"),
    "report": ("bench.report", "run records as one HTML page, and as PNG"),
    "ledger": ("bench.ledger", "whether each claim of the README has evidence that still holds"),
}


class Benchmark(Protocol):
    """What the module of a benchmark has."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Declare its flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; gives the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tercet bench ARGV` and give its exit code: 2 a flag is wrong, 3 the model is refused, 4 it failed."""
    given = sys.argv[1:] if argv is None else list(argv)
    if not given or given[0] not in COMMANDS:
        return _help(given)
    module, text = COMMANDS[given[0]]
    benchmark = cast("Benchmark", importlib.import_module(module))
    parser = argparse.ArgumentParser(prog=f"{PROG} {given[0]}", description=f"{text}.", allow_abbrev=False)
    benchmark.add_flags(parser)
    parser.set_defaults(words=given)
    try:
        return benchmark.run(parser.parse_args(given[1:]))
    except (BenchError, StartError) as error:
        return _failed(error, error.exit_code)
    except FrontendError as error:
        return _failed(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _help(given: Sequence[str]) -> int:
    asked = not given or given[0] in {"-h", "--help"}
    lines = [f"usage: {PROG} BENCHMARK [flags]", "", *(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())]
    if not asked:
        lines = [f"error: {PROG}: no benchmark {given[0]!r}; known: {', '.join(COMMANDS)}"]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _failed(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
