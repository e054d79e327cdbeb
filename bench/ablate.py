"""`tercet bench ablate`: the packaged server with one option after the other off, at equal budget.

Every set of options gets the same loads, the same memory for its KV cache and a server of its own in every repeat;
the sets take turns, so that what changes on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, structs
from tqdm import tqdm

from bench.arrivals import Pace
from bench.errors import UsageError
from bench.options import (
    add_output_flags,
    add_serve_flag,
    add_shape_flags,
    command_line,
    deliver,
    settings,
    shape_of,
)
from bench.processes import look_below
from bench.prompts import Request, Shape, digest, random_requests
from bench.record import make_record
from bench.result import DEFINITIONS, Wanted, figures
from bench.samples import Spread, spread
from bench.serve import COMPLETIONS, WARMUP_SEED, Endpoint, Run
from bench.target import fetch, model_name, served
from frontend.proof.own_server import OwnServer

MIB: Final = 2**20
SHARED: Final = 0.75
BASE: Final = "default"
SETS: Final[Mapping[str, str]] = {
    BASE: "",
    "KV cache off": "--no-enable-kv-cache",
    "paging off": "--kv-cache-reservation contiguous",
    "continuous batching off": "--batching static",
    "overlap off": "--no-async-scheduling",
    "prefix cache off": "--no-enable-prefix-caching",
    "short mixed steps off": "--mixed-prefill-token-threshold 8192",
    "chunks off": "--max-num-batched-tokens 8192 --long-prefill-token-threshold 8192",
    "graphs off": "--enforce-eager",
}
# Of each load; memory is looked at after both.
FIGURES: Final = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
LOADS: Final = ("plain", "shared")
OWN: Final = {
    "plain, shared": f"loads whose prompts share nothing, and {SHARED:.0%} of their tokens",
    "memory_mib": "proportional memory (PSS) of all processes of the server after both loads",
    "spread": "median, smallest and largest of the repeats",
    "ratio": "median output_throughput of the load, divided by that of the first set",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--sets", nargs="+", metavar="NAME", help=f"out of: {', '.join(SETS)} (default: all)")
    parser.add_argument(
        *("--set",),
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "FLAGS"),
        help="a further set: flags of `tercet serve`, in one word (repeatable)",
    )
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="default: 3")
    parser.add_argument("--max-concurrency", metavar="N", type=int, default=8, help="requests at once (default: 8)")
    parser.add_argument("--num-prompts", metavar="N", type=int, default=24, help="of each load (default: 24)")
    parser.add_argument("--kv-memory-mib", metavar="N", type=int, default=512, help="of every set (default: 512)")
    add_serve_flag(parser)
    add_shape_flags(parser, Shape(input_len=256, output_len=32))
    add_output_flags(parser)


class Plan(Struct, frozen=True):
    """What every set of options goes through.

    Attributes:
        model, flags: of the server.
        loads: by name; warmup: before them.
        max_concurrency: requests at once.
    """

    model: Path
    flags: list[str]
    warmup: list[Request]
    loads: dict[str, list[Request]]
    max_concurrency: int

    def measure(self, flags: Sequence[str]) -> dict[str, Any]:
        """Figures by load, memory and kernels of one server."""
        with OwnServer(self.model, [*self.flags, *flags]) as server:
            server.wait_ready()
            endpoint = Endpoint(server.url, COMPLETIONS, model_name(server.url))
            Run(self.warmup, [], Pace(), self.max_concurrency, 0).measure(endpoint)
            found: dict[str, Any] = {
                name: figures(Run(requests, [], Pace(), self.max_concurrency, 0).measure(endpoint), Wanted())
                for name, requests in self.loads.items()
            }
            memory = sum(one.pss for one in look_below(os.getpid())) / MIB
            return found | {"memory_mib": memory, "kernels": fetch(server.url, "/reports/kernels")}


def run(args: argparse.Namespace) -> int:
    """Measure and deliver."""
    chosen = sets(args.sets, args.set)
    if min(args.repeats, args.max_concurrency, args.num_prompts, args.kv_memory_mib) < 1:
        raise UsageError("--repeats, --max-concurrency, --num-prompts, --kv-memory-mib: must be at least 1")
    plan = _plan(args)
    turns = [name for _ in range(args.repeats) for name in chosen]
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for name in tqdm(turns, unit="server", file=sys.stderr, disable=None):
        samples[name].append(plan.measure(shlex.split(chosen[name])))
    results = summarize(chosen, samples)
    record = make_record(
        "ablate",
        command_line(args),
        results,
        raw=[samples],
        kernels=samples[next(iter(chosen))][0]["kernels"],
        config=settings(args),
        seeds={"prompts": args.seed},
        data={name: digest(requests) for name, requests in plan.loads.items()},
        definitions=DEFINITIONS | OWN,
    )
    deliver(args, record, titles(), rows(results))
    return 0


def sets(names: Sequence[str] | None, further: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Flags by name of the sets that were asked for, the one that others are compared with first.

    Raises:
        UsageError: a name is not known.
    """
    if unknown := set(names or ()) - set(SETS):
        raise UsageError(f"--sets: {', '.join(sorted(unknown))}; known: {', '.join(SETS)}")
    wanted = [BASE, *names] if names else list(SETS)
    return {name: SETS[name] for name in wanted} | dict(further)


def _plan(args: argparse.Namespace) -> Plan:
    shape = shape_of(args)
    common = int(shape.input_len * SHARED)
    shared = structs.replace(shape, prefix_len=common, input_len=shape.input_len - common)
    model, flags = served(args.serve)
    return Plan(
        model=model,
        flags=[*flags, "--kv-cache-memory-bytes", str(args.kv_memory_mib * MIB)],
        warmup=random_requests(shape, 2, args.seed + WARMUP_SEED),
        loads={
            "plain": random_requests(shape, args.num_prompts, args.seed),
            "shared": random_requests(shared, args.num_prompts, args.seed + 1),
        },
        max_concurrency=args.max_concurrency,
    )


def summarize(chosen: Mapping[str, str], samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A result for each set: spreads over the repeats, and ratios to the first set."""
    found: list[dict[str, Any]] = []
    for name, repeats in samples.items():
        result: dict[str, Any] = {"set": name, "flags": chosen[name]}
        for load in LOADS:
            by_figure = {figure: spread([float(one[load][figure]) for one in repeats]) for figure in FIGURES}
            result[load] = {figure: structs.asdict(value) for figure, value in by_figure.items()}
            base = found[0] if found else result
            result[load]["ratio"] = _rate(result, load) / _rate(base, load)
        result["memory_mib"] = structs.asdict(spread([one["memory_mib"] for one in repeats]))
        found.append(result)
    return found


def _rate(result: Mapping[str, Any], load: str) -> float:
    return float(result[load]["output_throughput"]["median"])


def titles() -> list[str]:
    """Of the table."""
    per_load = [f"{figure} {load}" for load in LOADS for figure in ("tok/s", "x", "TTFT ms", "ITL ms")]
    return ["set", *per_load, "memory MiB"]


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """The table's lines."""
    found = []
    for result in results:
        line: list[object] = [result["set"]]
        for load in LOADS:
            of = result[load]
            line += [Spread(**of["output_throughput"]), f"{of['ratio']:.2f}"]
            line += [Spread(**of[figure]) for figure in ("median_ttft_ms", "median_itl_ms")]
        found.append([*line, f"{result['memory_mib']['median']:.0f}"])
    return found
