"""`tercet bench compare`: commands in turn, A B A B, and the ratios of what they report.

A command is a line for the shell whose last line of output is a JSON object with the figure. A server is a line that
starts one, under each load of `tercet bench serve` in turn; its figures are "LOAD: figure", and memory_mib.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import IO, Any, Final

from msgspec import Struct, structs
from tqdm import tqdm

from bench.errors import CommandFailed, UsageError
from bench.options import add_output_flags, command_line, deliver, settings
from bench.processes import look, look_below
from bench.record import make_record
from bench.samples import spread

FIGURE: Final = "output_throughput"
MEMORY: Final = "memory_mib"
LAST_BYTES: Final = 2000
MIB: Final = 2**20
POLL_S: Final = 0.25
END_S: Final = 30.0
DEFINITIONS: Final = {
    "median, low, high": "of the figure over the rounds",
    MEMORY: "of a server: proportional memory (PSS) of all its processes after the loads",
    "ratio": "median of the figure divided by the first command's median",
    "ratio_low, ratio_high": "smallest and largest ratio of the two within one round",
}


class Contestant(Struct, frozen=True):
    """Something to be measured.

    Attributes:
        name: in the table.
        command: line for the shell; of a server where it has a url.
        url: where the server answers; empty: the command itself reports the figure.
        loads: of a server: flags of `tercet bench serve` by name.
    """

    name: str
    command: str
    url: str = ""
    loads: dict[str, str] = {}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        *("--run",),
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "COMMAND"),
        help="a shell line; its last line of output is JSON with the figure (repeatable)",
    )
    parser.add_argument(
        *("--server",),
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "URL", "COMMAND"),
        help="a shell line that starts a server which answers at URL; it gets every --load (repeatable)",
    )
    parser.add_argument(
        *("--load",),
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "FLAGS"),
        help="for servers: flags of `tercet bench serve`, in one word (repeatable)",
    )
    parser.add_argument(
        *("--figure",),
        nargs="+",
        default=[FIGURE],
        metavar="NAME",
        help=f"in the JSON, with dots into objects; of a server in each load, or {MEMORY} (default: {FIGURE})",
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=3, help="turns of every command (default: 3)")
    parser.add_argument("--timeout", metavar="S", type=float, default=1800.0, help="for one command, or a start")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and deliver."""
    contestants = _contestants(args)
    samples: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contestants}
    turns = [one for _ in range(args.rounds) for one in contestants]
    for one in tqdm(turns, unit="run", file=sys.stderr, disable=None):
        samples[one.name].append(measure(one, args.timeout))
    results = [result for figure in _figures(args) for result in ratios(samples, figure)]
    record = make_record(
        "compare",
        command_line(args),
        results,
        raw=[samples],
        config=settings(args) | {"contestants": [structs.asdict(one) for one in contestants]},
        definitions=DEFINITIONS,
    )
    deliver(args, record, ("name", "figure", "median", "low", "high", "ratio", "spread of ratio"), rows(results))
    return 0


def _contestants(args: argparse.Namespace) -> list[Contestant]:
    loads = dict(args.load)
    found = [Contestant(name, command) for name, command in args.run]
    found += [Contestant(name, command, url, loads) for name, url, command in args.server]
    if len({one.name for one in found}) < max(1, len(found)):
        raise UsageError("--run, --server: give at least one, all with different names")
    if args.rounds < 1 or not args.timeout > 0:
        raise UsageError("--rounds, --timeout: at least 1, and above 0")
    if bool(args.server) != bool(loads) or (args.server and args.run) or len(loads) < len(args.load):
        raise UsageError("--load: servers need one or more, with different names, and commands have none")
    return found


def _figures(args: argparse.Namespace) -> list[str]:
    """The names of what is compared, as `measure` has them."""
    loads = dict(args.load)
    by_load = [f"{load}: {figure}" for load in loads for figure in args.figure if figure != MEMORY]
    return by_load + [figure for figure in args.figure if not loads or figure == MEMORY]


def measure(contestant: Contestant, timeout_s: float) -> dict[str, Any]:
    """One turn of one contestant.

    Raises:
        CommandFailed: it failed, took too long, or its last line is no JSON object.
    """
    if not contestant.url:
        return last_object(contestant.name, contestant.command, timeout_s)
    with _server(contestant, timeout_s) as pid:
        words = [sys.executable, "-m", "bench", "serve", "--base-url", contestant.url, "--json"]
        found: dict[str, Any] = {}
        for load, flags in contestant.loads.items():
            figures = last_object(f"{contestant.name}, {load}", f"{shlex.join(words)} {flags}", timeout_s)
            found |= {f"{load}: {name}": value for name, value in figures.items()}
        processes = [one for one in (look(pid), *look_below(pid)) if one is not None]
        return found | {MEMORY: sum(one.pss for one in processes) / MIB}


def last_object(name: str, command: str, timeout_s: float) -> dict[str, Any]:
    """The JSON object in the last line that a shell line writes to its output.

    Raises:
        CommandFailed: it failed, took too long, or its last line is something else.
    """
    with tempfile.TemporaryFile() as errors:
        with _group(command, subprocess.PIPE, errors) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                raise CommandFailed(f"{name}: it took longer than {timeout_s:g} s") from error
        if process.returncode:
            raise CommandFailed(f"{name}: status {process.returncode}: {_tail(errors)}")
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CommandFailed(f"{name}: the last line of its output is no JSON object: {lines[-1:]}")
    return found


@contextlib.contextmanager
def _group(command: str, stdout: int | IO[bytes], stderr: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A shell line in a process group of its own, none of which is left when the block is."""
    with subprocess.Popen(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    # Whatever of the group is left, the leader or not.
    _signal(process, signal.SIGKILL)
    process.wait(END_S)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _server(contestant: Contestant, timeout_s: float) -> Iterator[int]:
    with tempfile.TemporaryFile() as log, _group(contestant.command, log, log) as process:
        deadline = time.monotonic() + timeout_s
        while not _ready(contestant.url.rstrip("/")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CommandFailed(f"{contestant.name}: no server answers at {contestant.url}: {_tail(log)}")
            time.sleep(POLL_S)
        yield process.pid


def _ready(url: str) -> bool:
    """Whether a server is ready, by /health where it has that: some answer other requests while they load."""
    status = _status(f"{url}/health")
    return status == HTTPStatus.OK or (status == HTTPStatus.NOT_FOUND and _status(f"{url}/v1/models") == HTTPStatus.OK)


def _status(url: str) -> int | None:
    """Of the answer; None: there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _tail(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read()[-LAST_BYTES:].decode(errors="replace").strip()


def ratios(samples: Mapping[str, Sequence[Mapping[str, Any]]], figure: str) -> list[dict[str, Any]]:
    """A result for each command, compared with the first.

    Raises:
        CommandFailed: the figure is missing in one, or no number above 0.
    """
    values = {name: [_value(name, one, figure) for one in found] for name, found in samples.items()}
    first = next(iter(values.values()))
    results = []
    for name, found in values.items():
        seen, pairs = spread(found), [mine / other for mine, other in zip(found, first, strict=True)]
        results.append(
            {
                "name": name,
                "figure": figure,
                "median": seen.median,
                "low": seen.low,
                "high": seen.high,
                "ratio": seen.median / spread(first).median,
                "ratio_low": min(pairs),
                "ratio_high": max(pairs),
            }
        )
    return results


def _value(name: str, found: Mapping[str, Any], figure: str) -> float:
    value: object = found.get(figure)
    if value is None and "." in figure:
        value = found
        for key in figure.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CommandFailed(f"{name}: {figure} is {value!r}, not a number above 0; it has: {', '.join(found)}")
    return float(value)


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """The table's lines."""
    return [
        [
            *(one["name"], one["figure"]),
            *(f"{one[name]:.2f}" for name in ("median", "low", "high", "ratio")),
            f"{one['ratio_low']:.2f}-{one['ratio_high']:.2f}",
        ]
        for one in results
    ]
