"""`tercet bench startup`: seconds until a server is ready, cold and warm, and the memory of its processes."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct, to_builtins
from tqdm import tqdm

from bench.arrivals import Pace
from bench.errors import BenchError, UsageError
from bench.options import add_output_flags, add_serve_flag, columns, command_line, deliver, settings
from bench.processes import Process, look_below
from bench.prompts import Shape, random_requests
from bench.record import make_record
from bench.samples import spread
from bench.serve import COMPLETIONS, Endpoint, Run
from bench.target import fetch, model_name, served
from frontend.proof.own_server import OwnServer

MIB: Final = 2**20
LOAD_VOCAB: Final = 256
TITLES: Final = ("start", "repeats", "ready_s", "low", "high", "frontend_mib", "core_mib", "executor_mib", "total_mib")
DEFINITIONS: Final = {
    "ready_s": "seconds from the start of the process to the first 200 of /ready: median, low and high of the repeats",
    "cold": "the model's files were dropped from the page cache before; warm: they were read by the start before",
    "*_mib": "proportional memory (PSS) of each process in MiB once the server is ready, median of the repeats; with "
    "--load after a batch of requests; total_mib: of all processes of the server",
    "page_cache_share": "of the weights, how much was in memory already, as the executor saw it",
    "phases": "seconds by /reports/startup, of the repeat with the median",
}

ROLES: Final = ("frontend", "core", "executor")

Kind = Literal["cold", "warm"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="of each kind of start (default: 3)")
    parser.add_argument("--load", metavar="N", type=int, default=0, help="requests at once before memory is read")
    add_serve_flag(parser)
    add_output_flags(parser)


class Start(Struct, frozen=True):
    """One start.

    Attributes:
        kind: cold or warm.
        ready_s: seconds until it was ready.
        processes: once it was.
        phases: seconds, by the server's own report.
        page_cache_share: of the weights, how much was in memory before.
    """

    kind: Kind
    ready_s: float
    processes: list[Process]
    phases: object
    page_cache_share: object


def run(args: argparse.Namespace) -> int:
    """Measure and deliver."""
    if args.repeats < 1 or args.load < 0:
        raise UsageError("--repeats, --load: at least 1, and at least 0")
    model, flags = served(args.serve)
    kinds: list[Kind] = [kind for _ in range(args.repeats) for kind in ("cold", "warm")]
    starts = [
        measure(kind, model, flags, args.load) for kind in tqdm(kinds, unit="start", file=sys.stderr, disable=None)
    ]
    results = [result([each for each in starts if each.kind == kind]) for kind in ("cold", "warm")]
    record = make_record(
        "startup",
        command_line(args),
        results,
        raw=[to_builtins(each) for each in starts],
        config=settings(args),
        data={"model": model.name},
        definitions=DEFINITIONS,
    )
    deliver(args, record, TITLES, columns(results, TITLES))
    return 0


def measure(kind: Kind, model: Path, flags: Sequence[str], load: int) -> Start:
    """Start a server, look at it, and end it."""
    if kind == "cold":
        drop_from_page_cache(model)
    began = time.monotonic()
    with OwnServer(model, flags) as server:
        server.wait_ready()
        ready_s = time.monotonic() - began
        if load:
            requests = random_requests(Shape(vocab=LOAD_VOCAB), load, seed=1)
            Run(requests, [], Pace(), None, 1).measure(Endpoint(server.url, COMPLETIONS, model_name(server.url)))
        match fetch(server.url, "/reports/startup"):
            case {"seconds": phases, "page_cache_share": share}:
                return Start(kind, ready_s, look_below(os.getpid()), phases, share)
    raise BenchError("/reports/startup: the server tells no times")


def drop_from_page_cache(folder: Path) -> None:
    """Have the system forget the contents of a folder's files, where it keeps copies in memory."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def result(starts: Sequence[Start]) -> dict[str, object]:
    """Figures of starts of one kind."""
    seconds = spread([each.ready_s for each in starts])
    middle = sorted(starts, key=lambda each: each.ready_s)[len(starts) // 2]
    by_role = {
        role: [sum(one.pss for one in each.processes if one.role == role) / MIB for each in starts] for role in ROLES
    }
    return {
        "start": starts[0].kind,
        "repeats": len(starts),
        "ready_s": seconds.median,
        "low": seconds.low,
        "high": seconds.high,
        **{f"{role}_mib": statistics.median(sizes) for role, sizes in by_role.items()},
        "total_mib": statistics.median(sum(one.pss for one in each.processes) / MIB for each in starts),
        "phases": middle.phases,
        "page_cache_share": middle.page_cache_share,
    }
