"""`tercet bench throughput`: tokens a second of the engine without HTTP, all requests at once.

With --http a load of the same shape goes through HTTP on the same server, next to each: what is left of the rate.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Final

from msgspec import Struct
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
HTTP_TITLES: Final = ("http_throughput", "http_share", "http_share_low", "http_share_high")
OWN: Final = {
    "output_throughput, low, high": "answer tokens a second: median, smallest and largest of the repeats",
    "other figures": "of the repeat with the median rate",
    "raw": "of each number the loads on the engine in order, then those through HTTP",
    "http_throughput": "as output_throughput, of the loads through HTTP",
    "http_share, http_share_low, http_share_high": "rate through HTTP divided by the engine's in the same repeat: "
    "median, smallest and largest",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--num-prompts", metavar="N", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="of each number (default: 3)")
    parser.add_argument("--http", action="store_true", help="measure each load through HTTP too, in turn")
    add_serve_flag(parser)
    add_shape_flags(parser, Shape())
    add_output_flags(parser)


class Batch(Struct, frozen=True):
    """Loads of so many requests, one for each repeat.

    Attributes:
        loads: on the engine; http: through HTTP, as many, or none.
    """

    count: int
    loads: list[Load]
    http: list[Load]


def run(args: argparse.Namespace) -> int:
    """Measure and deliver."""
    if args.repeats < 1 or min(args.num_prompts) < 1:
        raise UsageError("--repeats, --num-prompts: must be at least 1")
    sides = 1 + args.http
    batches = {count: _requests(shape_of(args), count, args.repeats * sides, args.seed) for count in args.num_prompts}
    kernels, found = with_engine(args.serve, [], functools.partial(_measure, batches, sides))
    results = [_result(batch) for batch in found]
    record = make_record(
        "throughput",
        command_line(args),
        results,
        raw=[[raw(load) for load in (*batch.loads, *batch.http)] for batch in found],
        kernels=kernels,
        config=settings(args),
        seeds={"prompts": args.seed},
        data={str(count): digest([one for requests in each for one in requests]) for count, each in batches.items()},
        definitions=DEFINITIONS | OWN,
    )
    titles = (*TITLES, *HTTP_TITLES) if args.http else TITLES
    deliver(args, record, titles, columns(results, titles))
    return 0


def _requests(shape: Shape, count: int, loads: int, seed: int) -> list[list[Request]]:
    """The requests of the warm-up, then those of each load; none twice.

    The warm-up is a whole load: the first to use memory of the KV cache pays for it, and that is not measured here.
    """
    first = random_requests(shape, count, seed + WARMUP_SEED + count)
    return [first, *(random_requests(shape, count, seed + 1000 * count + each) for each in range(loads))]


async def _measure(batches: dict[int, list[list[Request]]], sides: int, engine: Engine) -> tuple[object, list[Batch]]:
    found = []
    total = sum(map(len, batches.values()))
    with tqdm(total=total, unit="run", file=sys.stderr, disable=None) as bar:
        for count, (warmup, *runs) in batches.items():
            batch = Batch(count, [], [])
            await engine.at_once(warmup)
            bar.update()
            for index, requests in enumerate(runs):
                http = is_http(index, sides)
                (batch.http if http else batch.loads).append(await engine.at_once(requests, http=http))
                bar.update()
            found.append(batch)
    return engine.kernels, found


def is_http(index: int, sides: int) -> bool:
    """Whether a load goes through HTTP: with two sides A B B A, so that a drift of the machine favours neither."""
    return sides == 2 and index % 4 in {1, 2}


def _result(batch: Batch) -> dict[str, object]:
    """Raises LoadFailed: a request failed."""
    answers = [answer for load in (*batch.loads, *batch.http) for answer in load.answers]
    if failed := [answer.error for answer in answers if answer.error]:
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
        **_of_http(batch),
    }


def _of_http(batch: Batch) -> dict[str, object]:
    if not batch.http:
        return {}
    share = spread([rate(http) / rate(load) for load, http in zip(batch.loads, batch.http, strict=True)])
    return {
        "http_throughput": spread([rate(load) for load in batch.http]).median,
        "http_share": share.median,
        "http_share_low": share.low,
        "http_share_high": share.high,
    }


def rate(load: Load) -> float:
    """Answer tokens a second."""
    return sum(answer.output_tokens for answer in load.answers) / load.seconds
