"""`tercet bench throughput`: tokens a second of the engine without HTTP, all requests at once."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Final

from msgspec import Struct, structs
from tqdm import tqdm

from bench.engine import Engine, with_engine
from bench.errors import LoadFailed, UsageError
from bench.load import Load
from bench.options import (
    add_output_flags,
    add_serve_flag,
    add_shape_flags,
    columns,
    command_line,
    deliver,
    settings,
    shape_of,
)
from bench.prompts import Request, Shape, digest, random_requests
from bench.record import make_record
from bench.result import DEFINITIONS, Wanted, figures, raw
from bench.samples import spread
from bench.serve import WARMUP_SEED

TITLES: Final = (
    *("num_prompts", "repeats", "output_throughput", "low", "high", "total_token_throughput"),
    *("median_ttft_ms", "median_itl_ms", "p99_itl_ms"),
)
OWN: Final = {
    "output_throughput, low, high": "answer tokens a second: median, smallest and largest of the repeats",
    "other figures": "of the repeat with the median rate",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--num-prompts", metavar="N", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="of each number (default: 3)")
    add_serve_flag(parser)
    add_shape_flags(parser, Shape())
    add_output_flags(parser)


class Batch(Struct, frozen=True):
    """Loads of so many requests, one for each repeat."""

    count: int
    loads: list[Load]


def run(args: argparse.Namespace) -> int:
    """Measure and deliver."""
    if args.repeats < 1 or min(args.num_prompts) < 1:
        raise UsageError("--repeats, --num-prompts: must be at least 1")
    batches = {count: _requests(shape_of(args), count, args.repeats, args.seed) for count in args.num_prompts}
    kernels, found = with_engine(args.serve, [], functools.partial(_measure, batches))
    results = [_result(batch) for batch in found]
    record = make_record(
        "throughput",
        command_line(args),
        results,
        raw=[[raw(load) for load in batch.loads] for batch in found],
        kernels=kernels,
        config=settings(args),
        seeds={"prompts": args.seed},
        data={str(count): digest([one for requests in each for one in requests]) for count, each in batches.items()},
        definitions=DEFINITIONS | OWN,
    )
    deliver(args, record, TITLES, columns(results, TITLES))
    return 0


def _requests(shape: Shape, count: int, repeats: int, seed: int) -> list[list[Request]]:
    """The requests of the warm-up, then those of each repeat; none twice."""
    warm = structs.replace(shape, output_len=min(8, shape.output_len))
    first = random_requests(warm, count, seed + WARMUP_SEED + count)
    return [first, *(random_requests(shape, count, seed + 1000 * count + each) for each in range(repeats))]


async def _measure(batches: dict[int, list[list[Request]]], engine: Engine) -> tuple[object, list[Batch]]:
    found = []
    total = sum(map(len, batches.values()))
    with tqdm(total=total, unit="run", file=sys.stderr, disable=None) as bar:
        for count, runs in batches.items():
            loads = []
            for requests in runs:
                loads.append(await engine.at_once(requests))
                bar.update()
            found.append(Batch(count, loads[1:]))
    return engine.kernels, found


def _result(batch: Batch) -> dict[str, object]:
    """Raises LoadFailed: a request failed."""
    if failed := [answer.error for load in batch.loads for answer in load.answers if answer.error]:
        raise LoadFailed(f"{len(failed)} requests failed, the first: {failed[0]}")
    ordered = sorted(batch.loads, key=rate)
    rates = spread([rate(load) for load in ordered])
    return {
        "num_prompts": batch.count,
        "repeats": len(ordered),
        **figures(ordered[len(ordered) // 2], Wanted()),
        "output_throughput": rates.median,
        "low": rates.low,
        "high": rates.high,
    }


def rate(load: Load) -> float:
    """Answer tokens a second."""
    return sum(answer.output_tokens for answer in load.answers) / load.seconds
