"""A scheduler small enough to read: drives an executor, or a Runner, with requests that never stop early."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_core.wire.client import TokenLogprobs
from engine_core.wire.codec import pack_ids
from engine_core.wire.executor import KvGroup, Row, SlotFill, StepPlan, StepResult
from engine_core.wire.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Job:
    """A request.

    Attributes:
        prompt: token ids.
        count: tokens to generate.
        params, seed: of the sampling.
        arrives: step of its first row, from 1.
        output, logprobs: what came back.
    """

    prompt: list[int]
    count: int
    params: SamplingParams = GREEDY
    seed: int = 0
    arrives: int = 1
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0
    planned: int = 0
    last_step: int = 0
    tables: list[list[int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether its last token has been planned."""
        return self.planned == self.count


class Driver:
    """Runs jobs, one slot each, with blocks handed out in random order. Only those that a window has left behind come
    back, once no step that is out reads them.

    Args:
        send: takes a plan.
        receive: gives the next result.
        groups: the pools.
        block_size: tokens a block.
        chunk: most tokens of a prompt in a step.
        depth: plans that are out at once.
        epoch: of the plans.
        seed: of the order of blocks.
    """

    def __init__(
        self,
        send: Callable[[StepPlan], None],
        receive: Callable[[], StepResult],
        *,
        groups: Sequence[KvGroup],
        block_size: int,
        chunk: int = 10**6,
        depth: int = 1,
        epoch: int = 1,
        seed: int = 0,
    ) -> None:
        self._send = send
        self._receive = receive
        self._block_size = block_size
        self._chunk = chunk
        self._depth = depth
        self._epoch = epoch
        self._groups = groups
        self._random = random.Random(seed)
        self._pools: list[list[int]] = []
        self._left: list[tuple[int, int, list[int]]] = []
        self.reset_pool()
        self._step = 0
        self._steps = 0

    def reset_pool(self) -> None:
        """Take all blocks back, for jobs that are done."""
        self._pools = [list(range(group.num_blocks)) for group in self._groups]
        self._left = []
        for pool in self._pools:
            self._random.shuffle(pool)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs to their ends; their outputs are filled in."""
        out: deque[list[Job]] = deque()
        first = self._step
        while True:
            live = [job for job in jobs if not job.done]
            ready = [job for job in live if self._step - first + 1 >= job.arrives]
            if ready:
                out.append(self._plan(jobs, ready))
            elif live:
                raise AssertionError("nothing to run until the next job arrives")
            if not live and not out:
                return
            if len(out) >= self._depth or not live:
                self._take(out.popleft())

    def _plan(self, jobs: Sequence[Job], ready: Sequence[Job]) -> list[Job]:
        fills, rows, sampling = [], [], []
        self._step += 1
        for job in ready:
            slot = next(index for index, other in enumerate(jobs) if other is job)
            left = len(job.prompt) + job.planned - job.computed
            count = min(left, self._chunk)
            blocks = self._blocks(job, job.computed + count)
            if job.computed == 0:
                fills.append(SlotFill(slot, pack_ids(job.prompt), len(job.prompt), job.params, job.seed, blocks))
                blocks = []
            rows.append(Row(slot, job.computed, count, blocks if any(blocks) else [], count == left))
            job.computed += count
            job.last_step = self._step
            if count == left:
                job.planned += 1
                sampling.append(job)
        self._send(StepPlan(self._epoch, self._step, fills, rows))
        return sampling

    def _blocks(self, job: Job, tokens: int) -> list[list[int]]:
        if not job.tables:
            job.tables, job.freed = [[] for _ in self._groups], [0] * len(self._groups)
        taken = []
        for index, table in enumerate(job.tables):
            self._leave_behind(job, index)
            more = -(-tokens // self._block_size) - len(table)
            taken.append([self._pools[index].pop() for _ in range(more)])
            table += taken[-1]
        return taken

    def _leave_behind(self, job: Job, index: int) -> None:
        """Blocks before the window of all that is still computed come back after the last step that is out."""
        window = self._groups[index].window
        if window is None:
            return
        live = max(0, job.computed - window + 1) // self._block_size
        self._left.append((job.last_step, index, job.tables[index][job.freed[index] : live]))
        job.freed[index] = max(live, job.freed[index])

    def _return_blocks(self) -> None:
        for step, index, blocks in self._left:
            if step <= self._steps:
                pool = self._pools[index]
                for block in blocks:
                    pool.insert(self._random.randrange(len(pool) + 1), block)
        self._left = [entry for entry in self._left if entry[0] > self._steps]

    def _take(self, sampling: list[Job]) -> None:
        result = self._receive()
        self._steps += 1
        self._return_blocks()
        assert (result.epoch, result.step) == (self._epoch, self._steps)
        assert len(result.token_ids) == len(sampling)
        assert result.started_ns <= result.ended_ns
        for index, (job, token) in enumerate(zip(sampling, result.token_ids, strict=True)):
            job.output.append(token)
            entry = None if result.logprobs is None else result.logprobs[index]
            assert (entry is not None) == (job.params.logprobs is not None)
            if entry is not None:
                job.logprobs.append(entry)
