"""Throughput of the default model through the server, with each mode of the scheduler on and off.

    python -m bench.modes [--model FOLDER] [--clients 8] [--input 256] [--output 32]

Two loads: prompts that share nothing, and prompts that share three quarters. `idle` comes from the trace of the steps:
what lies between the end of one step of the executor and the start of the next, where another was to come at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.load import Result, Shape, summarize
from bench.server import BenchServer
from bench.stream import Streamed, stream_completion
from bench.table import table

DEADLINE_S = 600.0
SHARED = 0.75
# A longer gap is a lack of requests, not the engine's doing.
LONGEST_GAP_US = 50_000.0
MODES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default", ()),
    ("no overlap", ("--no-async-scheduling",)),
    ("no prefix cache", ("--no-enable-prefix-caching",)),
    ("no chunks", ("--max-num-batched-tokens", "8192", "--long-prefill-token-threshold", "8192")),
    ("static batches", ("--batching", "static")),
)


@dataclass(frozen=True)
class Gaps:
    """Idle times of the executor between steps: how many, their median, and their share of the time of the steps."""

    count: int
    median_us: float
    share: float


def gaps(trace: Path) -> Gaps:
    """The gaps in a trace file."""
    events = json.loads(trace.read_bytes())["traceEvents"]
    idle = [event["dur"] for event in events if event["name"] == "idle" and event["dur"] < LONGEST_GAP_US]
    busy = sum(event["dur"] for event in events if event["name"] == "step")
    return Gaps(len(idle), statistics.median(idle or [0.0]), sum(idle) / (busy or 1.0))


async def load(url: str, shape: Shape, clients: int, requests: int, shared: float) -> Result:
    """A closed loop of `clients`; prompts begin with a common part of `shared` of their length."""
    draw = random.Random(shared)
    common = [draw.randrange(shape.vocab) for _ in range(int(shape.input * shared))]
    waiting = [
        [*common, *(draw.randrange(shape.vocab) for _ in range(shape.input - len(common)))] for _ in range(requests)
    ]
    done: list[Streamed] = []

    async def client() -> None:
        while waiting:
            body = {"prompt": waiting.pop(), "max_tokens": shape.output, "temperature": 0, "ignore_eos": True}
            done.append(await stream_completion(url, body, DEADLINE_S))

    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return summarize(done, clients, time.monotonic() - started)


def measure(model: Path, flags: Sequence[str], args: argparse.Namespace) -> list[str]:
    """The figures of one mode."""
    shape = Shape(args.input, args.output, args.vocab)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        threads = ["--cpu-threads", args.cpu_threads] if args.cpu_threads else []
        with BenchServer(model, [*flags, *threads, "--trace-file", str(trace)]) as server:
            asyncio.run(load(server.url, shape, 1, 1, 0.0))
            results = [
                asyncio.run(load(server.url, shape, args.clients, args.requests, shared)) for shared in (0.0, SHARED)
            ]
        found = gaps(trace)
    figures = [f"{value:.1f}" for result in results for value in (result.tokens_per_s, result.ttft_p50, result.itl_p50)]
    return [*figures, str(found.count), f"{found.median_us:.0f}", f"{100 * found.share:.2f}"]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="throughput with each mode of the scheduler on and off")
    parser.add_argument("--model", type=Path, help="default: the default model")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=1000, help="ids are drawn below this")
    parser.add_argument("--cpu-threads", help="of a step; fewer than the cores where other processes use them")
    parser.add_argument("--modes", nargs="+", choices=[name for name, _ in MODES], help="default: all")
    args = parser.parse_args()
    model = args.model or default_model()
    wanted = [(name, flags) for name, flags in MODES if not args.modes or name in args.modes]
    rows = [[name, *measure(model, flags, args)] for name, flags in wanted]
    load_titles = [f"{figure} {kind}" for kind in ("", "shared") for figure in ("tokens/s", "TTFT ms", "ITL ms")]
    print(table(["mode", *map(str.strip, load_titles), "gaps", "idle us", "idle %"], rows))
    return 0


def default_model() -> Path:
    """Its folder; it is made when there is none."""
    from scripts.default_model import default_cache, find_source, make

    return make(default_cache(), find_source())


if __name__ == "__main__":
    sys.exit(main())
