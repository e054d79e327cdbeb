"""`tercet bench latency`: one batch through the engine without HTTP, again and again."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

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
from bench.result import raw
from bench.samples import mean, percentile
from bench.serve import WARMUP_SEED
from bench.steps import read_steps

# Prompts are read at full speed, so that the batch then generates as a whole.
FULL_SPEED: Final = ("--mixed-prefill-token-threshold", "1000000")
PERCENTILES: Final = (10, 50, 90, 99)
TITLES: Final = (
    *("batch_size", "iterations", "avg_latency", "p50_latency", "p99_latency"),
    *("median_step_ms", "decode_throughput", "gap_share", "median_gap_us"),
)
DEFINITIONS: Final = {
    "avg_latency": "mean seconds from sending a batch to its last token; p10 .. p99: percentiles",
    "median_step_ms": "milliseconds between neighbouring tokens of a request, the first 2 of each left out",
    "decode_throughput": "batch size divided by the median step",
    "gap_share": "time of the executor between the end of one step and the start of the next, as share of the steps; "
    "both of exactly batch_size rows with one token each",
    "median_gap_us": "the median of these times, in microseconds",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--batch-size", metavar="N", type=int, default=32, help="requests at once (default: 32)")
    parser.add_argument("--iterations", metavar="N", type=int, default=3, help="default: 3")
    add_serve_flag(parser)
    add_shape_flags(parser, Shape())
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and deliver."""
    if args.batch_size < 1 or args.iterations < 1:
        raise UsageError("--batch-size, --iterations: must be at least 1")
    shape = shape_of(args)
    seeds = [args.seed + WARMUP_SEED, *(args.seed + each for each in range(args.iterations))]
    batches = [random_requests(shape, args.batch_size, seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        flags = [*FULL_SPEED, "--trace-file", str(trace), "--max-num-seqs", str(max(128, args.batch_size))]
        kernels, loads = with_engine(args.serve, flags, functools.partial(_measure, batches))
        result = figures(args.batch_size, loads) | _gaps(trace, args.batch_size)
    record = make_record(
        "latency",
        command_line(args),
        [result],
        raw=[[raw(load) for load in loads]],
        kernels=kernels,
        config=settings(args),
        seeds={"prompts": args.seed},
        data={"all": digest([one for batch in batches for one in batch])},
        definitions=DEFINITIONS,
    )
    deliver(args, record, TITLES, columns([result], TITLES))
    return 0


async def _measure(batches: list[list[Request]], engine: Engine) -> tuple[object, list[Load]]:
    loads = [await engine.at_once(batch) for batch in tqdm(batches, unit="batch", file=sys.stderr, disable=None)]
    return engine.kernels, loads[1:]


def figures(batch_size: int, loads: list[Load]) -> dict[str, object]:
    """Figures of the iterations.

    Raises:
        LoadFailed: a request failed, or had too few tokens to see a step.
    """
    answers = [answer for load in loads for answer in load.answers]
    if failed := [answer.error for answer in answers if answer.error]:
        raise LoadFailed(f"{len(failed)} requests failed, the first: {failed[0]}")
    gaps = [gap for answer in answers for gap in answer.gaps[2:]]
    if not gaps:
        raise LoadFailed("--random-output-len: answers of fewer than 4 tokens show no step")
    step = statistics.median(gaps)
    seconds = [load.seconds for load in loads]
    return {
        "batch_size": batch_size,
        "iterations": len(loads),
        "avg_latency": mean(seconds),
        **{f"p{percent}_latency": percentile(seconds, percent) for percent in PERCENTILES},
        "latencies": seconds,
        "median_step_ms": 1000 * step,
        "decode_throughput": batch_size / step,
    }


def _gaps(trace: Path, rows: int) -> dict[str, object]:
    steps = read_steps(trace, rows)
    if steps is None:
        return {}
    return {"gap_share": steps.gap_share, "median_gap_us": steps.median_gap_us, "steps_seen": steps.count}
