"""Runs a trace on a scheduler and the modelled executor, and checks everything that can be checked on the way."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pytest

from engine_core.errors import StaleResult
from engine_core.scheduler import Limits, RequestKey, Scheduler
from engine_core.sequence import MAX_PREEMPTIONS
from engine_core.wire.client import Output
from engine_core.wire.config import CacheOptions, SchedulerOptions
from engine_core.wire.executor import StepPlan, StepResult
from tests.model.executor import FakeExecutor, FenceWatch, Model
from tests.model.trace import Request, Tick, Trace

Force = Literal["never", "random", "each token"]
Reservation = Literal["paged", "contiguous"]
MOST_FORCED = 12
MOST_TURNS = 20_000


@dataclass(frozen=True)
class Mode:
    """One way to run a trace.

    Attributes:
        force: preemption by hand: never, at random, or after each token a request gets.
        eager: whether the modelled device runs a plan when it leaves, or only when its result is waited for.
    """

    overlap: bool = True
    prefix_caching: bool = True
    chunk: int = 0
    batching: Literal["continuous", "static"] = "continuous"
    policy: Literal["fcfs", "priority"] = "fcfs"
    force: Force = "never"
    eager: bool = False
    kv_cache: bool = True
    reservation: Reservation = "paged"


class Device(Protocol):
    """What runs plans."""

    def poison(self, free: list[frozenset[int]]) -> None:
        """Destroy what free blocks of each KV group hold."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one plan."""
        ...


@dataclass
class Received:
    """What a client got for one request."""

    tokens: list[int] = field(default_factory=list)
    end: Output | None = None


def make_scheduler(model: Model, mode: Mode, seed: int = 0) -> Scheduler:
    """A scheduler for a modelled device."""
    options = SchedulerOptions(
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        long_prefill_token_threshold=mode.chunk,
        scheduling_policy=mode.policy,
        batching=mode.batching,
        async_scheduling=mode.overlap,
    )
    limits = Limits(
        max_model_len=model.max_model_len,
        vocab_size=model.vocab,
        kv_groups=model.groups,
        block_size=model.block_size,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        eos_token_ids=model.eos,
    )
    cache = CacheOptions(
        block_size=model.block_size,
        enable_prefix_caching=mode.prefix_caching,
        enable_kv_cache=mode.kv_cache,
        kv_cache_reservation=mode.reservation,
    )
    return Scheduler(options, cache, limits, epoch=1, random=random.Random(seed))


class Harness:
    """One run of one trace.

    Attributes:
        received: what the clients got.
        starts: keys in the order in which a step first held them; a resumed request stands in it again.
        done: for each ended request the number of steps sent until then.
        steps: sent so far.
        tokens_per_step: what each step brought.
        salts: of the requests, by their seeds.
    """

    def __init__(self, model: Model, mode: Mode, seed: int = 0) -> None:
        self.model = model
        self.mode = mode
        self.scheduler = make_scheduler(model, mode, seed)
        self.received: dict[RequestKey, Received] = {}
        self.starts: list[RequestKey] = []
        self.done: dict[RequestKey, int] = {}
        self.tokens_per_step: list[int] = []
        self.steps = 0
        self.now = 100.0
        self.restarted = False
        self.salts: dict[int, str | None] = {}
        self._rng = random.Random(seed)
        self._key_of_seed: dict[int, RequestKey] = {}
        self._forced: dict[RequestKey, int] = {}
        self._new_executor(1)

    def _new_executor(self, epoch: int) -> None:
        self._executor = self.make_device(epoch)
        self._watch = FenceWatch(self.model)
        self._reached: dict[int, int] = {}
        self._plans: deque[StepPlan] = deque()
        self._results: deque[StepResult] = deque()

    def make_device(self, epoch: int) -> Device:
        """What runs the plans of an epoch."""
        return FakeExecutor(self.model, epoch, self.salts)

    def run(self, trace: Trace) -> None:
        """Play all ticks, then go on until nothing is left."""
        for tick in trace.ticks:
            self.play(tick)
            self.turn()
        self.drain()

    def drain(self) -> None:
        """Go on until nothing is left; then nothing may be held."""
        for _ in range(MOST_TURNS):
            if not self.scheduler.has_work():
                break
            self.now += 0.01
            self.turn()
        assert not self.scheduler.has_work()
        assert self.scheduler.ledger().owned == 0
        assert self.scheduler.status(self.now).kv_blocks_used == 0

    def play(self, tick: Tick) -> None:
        """What comes from outside."""
        self.now += tick.seconds
        for request in tick.arrivals:
            self.submit(request)
        for key in tick.aborts:
            self.take(key, self.scheduler.abort(key, self.now))
            assert self.scheduler.abort(key, self.now) is None
            self.check()
        if tick.restart:
            self.restart()

    def submit(self, request: Request) -> None:
        """A request that must be taken."""
        assert self.scheduler.add(request.key, request.submit, self.now) is None
        self.received[request.key] = Received()
        assert request.submit.params.seed is not None
        self._key_of_seed[request.submit.params.seed] = request.key
        self.salts[request.submit.params.seed] = request.submit.cache_salt

    def restart(self) -> None:
        """The executor dies with all that is out; a late result of it is refused."""
        late = self._results or [StepResult(plan.epoch, plan.step, [], None, 0, 1) for plan in self._plans]
        self.scheduler.restart(self.scheduler.epoch + 1)
        for result in late:
            with pytest.raises(StaleResult):
                self.scheduler.update(result, self.now)
        self._new_executor(self.scheduler.epoch)
        self.restarted = True
        self.check()

    def turn(self) -> None:
        """Send as many plans as may be out, then bring back the oldest."""
        while (plan := self.scheduler.schedule(self.now)) is not None:
            self.steps += 1
            self._leave(plan)
            self.check()
            if self._rng.random() < 0.3:
                break
        if self._plans:
            self._return()
            self.check()
            self._force()

    def _leave(self, plan: StepPlan) -> None:
        self._executor.poison(self.scheduler.free_blocks())
        self._watch.leaves(plan)
        self._plans.append(plan)
        if not self.mode.kv_cache:
            self._check_anew(plan)
        self.starts += [self._key_of_seed[fill.seed] for fill in plan.fills]
        if self.mode.eager:
            self._results.append(self._executor.run(plan))

    def _check_anew(self, plan: StepPlan) -> None:
        """Without a cache the computing of each token begins with the first one."""
        for fill in plan.fills:
            self._reached.pop(fill.slot, None)
        for row in plan.rows:
            assert row.start == self._reached.get(row.slot, 0)
            self._reached[row.slot] = 0 if row.sample else row.start + row.count

    def _return(self) -> None:
        plan = self._plans.popleft()
        result = self._results.popleft() if self.mode.eager else self._executor.run(plan)
        self._watch.returns()
        outputs = self.scheduler.update(result, self.now)
        self.tokens_per_step.append(len(outputs))
        for key, output in outputs:
            assert output.token_ids
            self.take(key, output)
        self._executor.poison(self.scheduler.free_blocks())

    def take(self, key: RequestKey, output: Output | None) -> None:
        """An output reaches its client."""
        if output is None:
            return
        received = self.received[key]
        assert output.request_id == key[1]
        assert received.end is None, "an output after the last one"
        received.tokens += output.token_ids
        if output.finish is not None:
            received.end = output
            self.done[key] = self.steps
            assert output.times is not None
            assert min(output.times.queued, output.times.prefill, output.times.decode) >= 0
            if self.mode.force == "never":
                assert output.times.preemptions <= MAX_PREEMPTIONS
        elif self.mode.force == "each token":
            self.scheduler.preempt(key)

    def _force(self) -> None:
        if self.mode.force != "random":
            return
        for key in self.received:
            if self._rng.random() < 0.15 and self._forced.get(key, 0) < MOST_FORCED and self.scheduler.preempt(key):
                self._forced[key] = self._forced.get(key, 0) + 1
        self.check()

    def check(self) -> None:
        """All that holds at any moment."""
        assert self.scheduler.check() == []
        ledger = self.scheduler.ledger()
        assert ledger.free + ledger.cached + ledger.owned == ledger.total
        assert ledger.total == sum(group.num_blocks for group in self.model.groups)
        assert self.mode.prefix_caching or ledger.cached == 0


def verify(trace: Trace, harness: Harness) -> None:
    """Each request got the answer it gets alone; an aborted one a beginning of it."""
    for request in trace.requests:
        received = harness.received[request.key]
        assert received.end is not None
        if received.end.finish == "abort":
            assert received.tokens == request.expected[: len(received.tokens)]
            continue
        assert received.tokens == request.expected
        assert received.end.finish == request.finish
        assert received.end.stop_token_id == (request.expected[-1] if request.finish == "stop" else None)
    status = harness.scheduler.status(harness.now)
    assert status.generation_tokens == sum(len(received.tokens) for received in harness.received.values())
    assert sum(status.finished.values()) == len(harness.received)
    assert status.prefix_hits <= status.prefix_queries
    assert harness.mode.prefix_caching or status.cached_tokens == 0
    if harness.mode.reservation == "contiguous" and (harness.mode.policy, harness.mode.force) == ("fcfs", "never"):
        assert status.preemptions == 0
