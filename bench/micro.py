"""What the engine core costs a step: the scheduler's time, and bytes and time of the wire, by rows.

    python -m bench.micro

No executor and no socket: results are made up, and what is measured runs in this process. Every row decodes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from bench.table import table
from engine_core.admission import Limits
from engine_core.scheduler import Scheduler
from engine_core.wire import codec
from engine_core.wire.client import Submit
from engine_core.wire.config import CacheOptions, SchedulerOptions
from engine_core.wire.executor import KvGroup, StepPlan, StepResult
from engine_core.wire.sampling import SamplingParams

PROMPT = 256
BLOCK_SIZE = 16
VOCAB = 32_000


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


def line(rows: int, steps: int) -> list[object]:
    """One line of the table."""
    down, up = codec.core_to_executor(), codec.executor_to_core()
    plain, _, _ = scheduler_us(rows, steps, overlap=False)
    overlapped, plan, result = scheduler_us(rows, steps, overlap=True)
    sent, back = down.encode(plan), up.encode(result)
    works: tuple[Callable[[], object], ...] = (
        lambda: down.encode(plan),
        lambda: down.decode(sent),
        lambda: up.encode(result),
        lambda: up.decode(back),
    )
    spent = [f"{microseconds(work, steps):.1f}" for work in works]
    return [rows, f"{overlapped:.1f}", f"{plain:.1f}", len(sent), len(back), *spent]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="costs of the engine core a decode step")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    titles = ("rows", "schedule+update us", "without overlap us", "plan bytes", "result bytes")
    codecs = ("plan encode us", "decode us", "result encode us", "decode us")
    print(table((*titles, *codecs), [line(rows, args.steps) for rows in args.rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
