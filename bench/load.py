"""A closed-loop load through HTTP: N clients, each with one request at a time.

    python -m bench.load http://127.0.0.1:8000 --clients 1 8 32 --input 256 --output 64

Prompts are token ids drawn from a seed, all different, so that no prefix is shared. Every request asks for exactly
`--output` tokens. A few requests before each run are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from bench.stream import Streamed, stream_completion

DEADLINE_S = 600.0


@dataclass(frozen=True)
class Shape:
    """Sizes of every request, in tokens; ids are drawn below `vocab`."""

    input: int
    output: int
    vocab: int


@dataclass(frozen=True)
class Result:
    """One run. Times in milliseconds; rates in output tokens a second, from the first request sent to the last end."""

    clients: int
    requests: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


def prompts(shape: Shape, seed: int) -> Iterator[list[int]]:
    """Endless prompts, equal for equal seeds."""
    draw = random.Random(seed)
    while True:
        yield [draw.randrange(shape.vocab) for _ in range(shape.input)]


async def run(url: str, shape: Shape, clients: int, requests: int, seed: int) -> Result:
    """Send `requests` requests by `clients` clients and measure."""
    source = prompts(shape, seed)
    for _ in range(min(2, clients)):
        await _one(url, shape, next(source))
    waiting = [next(source) for _ in range(requests)]
    done: list[Streamed] = []

    async def client() -> None:
        while waiting:
            done.append(await _one(url, shape, waiting.pop()))

    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return summarize(done, clients, time.monotonic() - started)


async def _one(url: str, shape: Shape, prompt: list[int]) -> Streamed:
    body = {"prompt": prompt, "max_tokens": shape.output, "temperature": 0, "ignore_eos": True}
    return await stream_completion(url, body, DEADLINE_S)


def summarize(done: Sequence[Streamed], clients: int, seconds: float) -> Result:
    """Percentiles over all requests (ttft) and all gaps between events (itl)."""
    ttfts = [1000 * one.ttft for one in done]
    gaps = [1000 * gap for one in done for gap in one.gaps] or [0.0]
    tokens = sum(one.output_tokens for one in done)
    return Result(
        clients=clients,
        requests=len(done),
        output_tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        ttft_p50=statistics.median(ttfts),
        ttft_p99=percentile(ttfts, 99),
        itl_p50=statistics.median(gaps),
        itl_p99=percentile(gaps, 99),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="closed-loop load through HTTP")
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=0, help="requests a run; default: 3 a client, at least 8")
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=1000, help="ids are drawn below this")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    shape = Shape(args.input, args.output, args.vocab)
    for clients in args.clients:
        requests = args.requests or max(8, 3 * clients)
        result = asyncio.run(run(args.url, shape, clients, requests, args.seed + clients))
        print(json.dumps({name: round(value, 2) for name, value in asdict(result).items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
