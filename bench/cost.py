"""`tercet bench cost`: what frontend and core cost a streamed token, measured under an executor without a model.

The executor answers each step after a fixed time with made-up tokens; text is made of them with the real tokenizer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from bench.arrivals import Pace
from bench.errors import BenchError, UsageError
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
from bench.processes import cpu_ns, look_below
from bench.prompts import Shape, digest, random_requests
from bench.record import make_record
from bench.result import DEFINITIONS, Wanted, figures, raw
from bench.serve import COMPLETIONS, WARMUP_SEED, Endpoint, Run
from bench.sources import ROOT
from bench.target import model_name, served
from frontend.proof.own_server import OwnServer

SCRIPT: Final = "TERCET_FAKE_EXECUTOR"
ROOM: Final = 8192
MEASURED: Final = ("frontend", "core")
TITLES: Final = (
    *("streams", "total_output_tokens", "output_throughput", "frontend_cpu_us_per_token", "core_cpu_us_per_token"),
    *("cpu_us_per_token", "client_cpu_us_per_token", "median_ttft_ms", "max_ttft_ms", "p99_itl_ms"),
)
OWN: Final = {
    "frontend_cpu_us_per_token": "processor microseconds of the frontend a token, over the run, prompts included",
    "core_cpu_us_per_token": "the same of the core",
    "cpu_us_per_token": "the sum of both",
    "max_ttft_ms": "the longest of all times to a first token; all requests are sent at once",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--streams", metavar="N", type=int, nargs="+", default=[64, 256], help="default: 64 256")
    parser.add_argument("--step-ms", metavar="MS", type=float, default=20.0, help="of the executor (default: 20)")
    add_serve_flag(parser)
    add_shape_flags(parser, Shape(input_len=32, output_len=128))
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and deliver."""
    if not (ROOT / "tests").is_dir():
        raise UsageError("tercet bench cost: the executor without a model is part of a source tree's tests")
    if args.step_ms < 0 or min(args.streams) < 1:
        raise UsageError("--step-ms, --streams: a time of at least 0, and at least 1 stream")
    shape = shape_of(args)
    with _server(args, shape) as server:
        endpoint = Endpoint(server.url, COMPLETIONS, model_name(server.url))
        runs = [_run(shape, streams, args.seed) for streams in args.streams]
        found = [_measure(each, endpoint) for each in runs]
    results = [result for result, _ in found]
    record = make_record(
        "cost",
        command_line(args),
        results,
        raw=[raw(load) for _, load in found],
        config=settings(args),
        seeds={"prompts": args.seed},
        data={f"run {index}": digest(each.requests) for index, each in enumerate(runs)},
        definitions=DEFINITIONS | OWN,
    )
    deliver(args, record, TITLES, columns(results, TITLES))
    return 0


@contextmanager
def _server(args: argparse.Namespace, shape: Shape) -> Iterator[OwnServer]:
    model, flags = served(args.serve)
    most = max(args.streams)
    blocks = most * (-(-(shape.prefix_len + 2 * (shape.input_len + shape.output_len)) // 16) + 2)
    script = f"vocab={args.vocab},blocks={blocks},max_model_len={ROOM},delay_s={args.step_ms / 1000}"
    given = ["--max-num-seqs", str(most), "--max-num-batched-tokens", str(ROOM), *flags]
    with _environment({SCRIPT: script, "PYTHONPATH": str(ROOT)}), OwnServer(model, given, "bench.modelless") as server:
        server.wait_ready()
        yield server


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables for the children that are started in this block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _run(shape: Shape, streams: int, seed: int) -> Run:
    return Run(
        requests=random_requests(shape, streams, seed),
        warmup=random_requests(shape, streams, seed + WARMUP_SEED),
        pace=Pace(),
        max_concurrency=None,
        seed=seed,
    )


def _measure(run: Run, endpoint: Endpoint) -> tuple[dict[str, object], Load]:
    pids = {found.role: found.pid for found in look_below(os.getpid()) if found.role in MEASURED}
    if missing := set(MEASURED) - set(pids):
        raise BenchError(f"tercet bench cost: no process of the server is the {', '.join(sorted(missing))}")
    # The warm-up apart: it has its own run.
    Run(run.warmup, [], run.pace, None, run.seed).measure(endpoint)
    before = {role: cpu_ns(pid) for role, pid in pids.items()}
    load = Run(run.requests, [], run.pace, None, run.seed).measure(endpoint)
    spent = {role: cpu_ns(pid) - before[role] for role, pid in pids.items()}
    tokens = max(1, sum(answer.output_tokens for answer in load.answers))
    result: dict[str, object] = {
        "streams": len(run.requests),
        **{f"{role}_cpu_us_per_token": spent[role] / 1000 / tokens for role in MEASURED},
        "cpu_us_per_token": sum(spent.values()) / 1000 / tokens,
        "max_ttft_ms": max(1000 * answer.ttft for answer in load.answers),
        **figures(load, Wanted()),
    }
    if load.seconds * 1e6 / tokens < float(str(result["client_cpu_us_per_token"])):
        sys.stderr.write("the client was the limit: its figures are its own\n")
    return result, load
