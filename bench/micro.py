"""`tercet bench micro`: costs of single parts, each measured in this process.

Scheduler and wire: no executor and no socket, results are made up, every row decodes. Kernels: see kernels.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import to_builtins
from tqdm import tqdm

from bench.errors import UsageError
from bench.options import add_output_flags, columns, command_line, deliver, settings
from bench.record import make_record
from engine_core.admission import Limits
from engine_core.block_pool import BlockPool
from engine_core.scheduler import Scheduler
from engine_core.wire import codec
from engine_core.wire.client import Submit
from engine_core.wire.config import CacheOptions, SchedulerOptions
from engine_core.wire.executor import KvGroup, StepPlan, StepResult
from engine_core.wire.sampling import SamplingParams

PROMPT = 256
BLOCK_SIZE = 16
VOCAB = 32_000
POOL_BLOCKS = 65_536
POOL_COUNTS = (1, 16, 256)
PARTS: Final = ("scheduler", "wire", "pool", "kernels")
TITLES: Final = ("part", "name", "us", "bytes", "gb_per_s", "gop_per_s", "bound", "fraction")
DEFINITIONS: Final = {
    "us": "median microseconds of a call, or of a step",
    "bytes": "of the message; of a kernel: what a call has to read and write at least",
    "fraction": "least time by the roofline divided by the measured one; the ceilings are those of this run: bytes of "
    "a large copy or sum, operations of a large product of the same numbers",
    "bound": "which of the two ceilings is the lower one",
}


def scheduler_of(rows: int, steps: int, *, overlap: bool) -> Scheduler:
    """A scheduler with `rows` requests that will run for longer than `steps` steps."""
    tokens = PROMPT + 4 * steps
    limits = Limits(
        max_model_len=tokens,
        vocab_size=VOCAB,
        kv_groups=(KvGroup(None, rows * -(-tokens // BLOCK_SIZE)),),
        block_size=BLOCK_SIZE,
        max_num_seqs=rows,
        max_num_batched_tokens=max(512, rows),
        eos_token_ids=(0,),
    )
    options = SchedulerOptions(max_num_seqs=rows, async_scheduling=overlap)
    scheduler = Scheduler(options, CacheOptions(block_size=BLOCK_SIZE), limits, epoch=1, random=random.Random(0))
    draw = random.Random(1)
    for number in range(rows):
        prompt = codec.pack_ids([draw.randrange(1, VOCAB) for _ in range(PROMPT)])
        submit = Submit(request_id=f"r{number}", prompt=prompt, params=SamplingParams(ignore_eos=True))
        assert scheduler.add((b"client", submit.request_id), submit, 0.0) is None
    return scheduler


class Steps:
    """Runs a scheduler by itself: every plan is answered with made-up tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._out: list[StepPlan] = []
        self._draw = random.Random(2)
        self.spent_ns = 0

    def __iter__(self) -> Iterator[tuple[StepPlan, StepResult]]:
        while True:
            began = time.perf_counter_ns()
            while (plan := self._scheduler.schedule(1.0)) is not None:
                self._out.append(plan)
            self.spent_ns = time.perf_counter_ns() - began
            done = self._out.pop(0)
            tokens = [self._draw.randrange(1, VOCAB) for row in done.rows if row.sample]
            result = StepResult(done.epoch, done.step, tokens, None, 0, 1)
            began = time.perf_counter_ns()
            self._scheduler.update(result, 1.0)
            self.spent_ns += time.perf_counter_ns() - began
            yield done, result


def scheduler_us(rows: int, steps: int, *, overlap: bool) -> tuple[float, StepPlan, StepResult]:
    """Median microseconds of the scheduler a decode step, and the last step's messages."""
    running = Steps(scheduler_of(rows, steps, overlap=overlap))
    spent: list[int] = []
    for plan, result in running:
        if len(plan.rows) == rows and all(row.count == 1 for row in plan.rows):
            spent.append(running.spent_ns)
        if len(spent) == steps:
            return statistics.median(spent) / 1000, plan, result
    raise AssertionError("the steps never end")


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of a call."""
    spent = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        work()
        spent.append(time.perf_counter_ns() - began)
    return statistics.median(spent) / 1000


def step_costs(rows: int, steps: int) -> Iterator[dict[str, Any]]:
    """Scheduler and wire at so many rows."""
    down, up = codec.core_to_executor(), codec.executor_to_core()
    plain, _, _ = scheduler_us(rows, steps, overlap=False)
    overlapped, plan, result = scheduler_us(rows, steps, overlap=True)
    sent, back = down.encode(plan), up.encode(result)
    yield {"part": "scheduler", "name": f"schedule and update, {rows} rows", "us": overlapped}
    yield {"part": "scheduler", "name": f"the same without overlap, {rows} rows", "us": plain}
    works: dict[str, tuple[Callable[[], object], int]] = {
        "plan encoded": (lambda: down.encode(plan), len(sent)),
        "plan decoded": (lambda: down.decode(sent), len(sent)),
        "result encoded": (lambda: up.encode(result), len(back)),
        "result decoded": (lambda: up.decode(back), len(back)),
    }
    for name, (work, size) in works.items():
        yield {"part": "wire", "name": f"{name}, {rows} rows", "us": microseconds(work, steps), "bytes": size}


def pool_costs(repeats: int) -> Iterator[dict[str, Any]]:
    """The block pool: blocks taken and given back, of a pool that is half full."""
    for count in POOL_COUNTS:
        pool = BlockPool(POOL_BLOCKS, lambda _: False, lambda _: None)
        pool.take(POOL_BLOCKS // 2)
        spent = microseconds(lambda pool=pool, count=count: pool.release(pool.take(count)), repeats)  # type: ignore[misc]
        yield {"part": "pool", "name": f"{count} blocks taken and released", "us": spent}


def kernel_costs(
    rows: Sequence[int], tokens: Sequence[int], context: int, threads: int | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every kernel case at these rows and these tokens of prompts, and the ceilings that they were measured against."""
    import torch

    from bench.ceilings import measure_ceilings
    from bench.kernels import CASES, TOKEN_CASES, Shape, measure_case
    from model_executor.errors import NativeUnavailable
    from model_executor.native.library import load_native

    if threads:
        torch.set_num_threads(threads)
    try:
        native = load_native(torch.get_num_threads())
    except NativeUnavailable as error:
        print(f"torch's kernels are measured: {error}", file=sys.stderr)
        native = None
    shape = Shape(context=context)
    makers = [(make, count) for make in CASES for count in rows]
    makers += [(make, count) for make in TOKEN_CASES for count in tokens]
    with torch.inference_mode():
        ceilings = measure_ceilings()
        found = [
            measure_case(case, shape.layers, ceilings)
            for make, count in tqdm(makers, unit="kernel", file=sys.stderr, disable=None)
            for case in make(native, shape, count)
        ]
    return found, to_builtins(ceilings)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--rows", metavar="N", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        nargs="*",
        default=[128, 512],
        help="of prompts, for kernels (default: 128 512)",
    )
    parser.add_argument("--steps", metavar="N", type=int, default=300, help="calls of each (default: 300)")
    parser.add_argument("--context", metavar="N", type=int, default=272, help="tokens in the cache (default: 272)")
    parser.add_argument("--cpu-threads", metavar="N", type=int, help="of the kernels (default: the cores)")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and deliver."""
    if min(*args.rows, *args.tokens, args.steps, args.context) < 1:
        raise UsageError("--rows, --tokens, --steps, --context: must be at least 1")
    results: list[dict[str, Any]] = []
    if not {"scheduler", "wire"}.isdisjoint(args.parts):
        results += [one for rows in args.rows for one in step_costs(rows, args.steps) if one["part"] in args.parts]
    if "pool" in args.parts:
        results += pool_costs(args.steps)
    ceilings: dict[str, Any] = {}
    if "kernels" in args.parts:
        found, ceilings = kernel_costs(args.rows, args.tokens, args.context, args.cpu_threads)
        results += found
        print(told(ceilings), file=sys.stderr)
    record = make_record(
        "micro",
        command_line(args),
        results,
        config=settings(args) | {"ceilings": ceilings},
        seeds={"made-up tokens": 2},
        definitions=DEFINITIONS,
    )
    deliver(args, record, TITLES, columns(results, TITLES))
    return 0


def told(ceilings: Mapping[str, Any]) -> str:
    """The ceilings in one line."""
    rates = ", ".join(f"{name} {rate / 1e9:.0f} Gop/s" for name, rate in ceilings["operations_per_s"].items())
    return f"ceilings: memory {ceilings['bytes_per_s'] / 1e9:.1f} GB/s, {rates}, {ceilings['threads']} threads"
