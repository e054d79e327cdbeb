"""The real executor under the harness of the modelled one: models of random weights on CPU, in this process."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from engine_core.scheduler import RequestKey
from engine_core.wire.client import FinishReason, Submit
from engine_core.wire.codec import pack_ids, unpack_ids
from engine_core.wire.config import (
    CacheOptions,
    EngineConfig,
    ExecutorOptions,
    ModelOptions,
    SchedulerOptions,
    TextFacts,
)
from engine_core.wire.executor import KvGroup, StepPlan, StepResult
from engine_core.wire.sampling import SamplingParams
from model_executor.models.reader import read_spec
from model_executor.runner import Launched, Runner
from model_executor.startup import Executor, PhaseClock, bring_up
from tests.model.choice import Choice
from tests.model.executor import Model, tables
from tests.model.harness import Device, Harness, Mode
from tests.model.trace import CLIENTS, Request, Tick, Trace
from tests.model_executor.driver import Driver, Job

BLOCK_SIZE: Final = 4
BLOCKS: Final = 200
VOCAB: Final = 512
MOST_ROWS: Final = 8
# Of the longest request: every pool of a trace holds it.
MOST_TOKENS: Final = 64
# Many, so that some streams end by one.
EOS: Final = tuple(range(5, VOCAB, 10))
BUCKETS: Final = (1, 2, 3, 5, 8)
KV_TOLERANCE: Final = 1e-4
# Finite, as everything in a cache is, and far from all that a model writes.
POISON: Final = 1e4


def bring_up_on_cpu(folder: Path, buckets: tuple[int, ...] = ()) -> Executor:
    """The executor of a folder; buckets are those of --cuda-graph-sizes."""
    config = EngineConfig(
        model=ModelOptions(model=str(folder), max_model_len=128),
        cache=CacheOptions(block_size=BLOCK_SIZE, num_kv_blocks=BLOCKS),
        scheduler=SchedulerOptions(max_num_seqs=MOST_ROWS, max_num_batched_tokens=256),
        executor=ExecutorOptions(device="cpu", cpu_threads=torch.get_num_threads(), cuda_graph_sizes=buckets),
        text=TextFacts(eos_token_ids=EOS, vocab_size=VOCAB),
    )
    clock = PhaseClock(time.monotonic(), lambda *_: None)
    return bring_up(config, read_spec(folder, config.model), 1, clock, lambda *_: None)


@dataclass
class _Slot:
    tokens: list[int]
    tables: list[list[int | None]]
    salt: str | None


# What a block of a KV group holds: the group, and all tokens up to the block's end.
_Name = tuple[int, tuple[int, ...]]


@dataclass
class Known:
    """What blocks of tokens look like in the cache; checked wherever one is reused.

    Attributes:
        keys: of the last layer of the group, [block_size, heads, head_dim].
        reused: for each group, blocks that were found again and compared.
    """

    keys: dict[_Name, Tensor] = field(default_factory=dict)
    reused: Counter[int] = field(default_factory=Counter)


class RealExecutor:
    """A Runner that poisons free blocks, and checks that a reused block holds what its tokens say.

    Args:
        runner: that computes.
        known: shared by executors of one model.
        salts: of requests, by their seeds.
    """

    def __init__(self, runner: Runner, known: Known, salts: Mapping[int, str | None]) -> None:
        self._runner = runner
        self._known = known
        self._salts = salts
        self._written: set[tuple[str | None, tuple[int, ...]]] = set()
        self._slots: dict[int, _Slot] = {}
        self._poisoned = [frozenset[int]() for _ in runner.cache.pools]

    def poison(self, free: list[frozenset[int]]) -> None:
        """See Device."""
        cache = self._runner.cache
        for group, blocks in enumerate(free):
            fresh = blocks - self._poisoned[group]
            if fresh:
                places = torch.tensor(sorted(fresh))
                for layer in (each for each, of in zip(cache.layers, cache.group_of, strict=True) if of == group):
                    layer.key.index_fill_(0, places, POISON)
                    layer.value.index_fill_(0, places, POISON)
            self._poisoned[group] = blocks

    def run(self, plan: StepPlan) -> StepResult:
        """See Device."""
        for fill in plan.fills:
            self._slots[fill.slot] = _Slot(list(unpack_ids(fill.token_ids)), tables(fill), self._salts[fill.seed])
        filled = {fill.slot for fill in plan.fills}
        for row in plan.rows:
            slot = self._slots[row.slot]
            for table, blocks in zip(slot.tables, row.blocks, strict=False):
                table += blocks
            if row.slot in filled:
                self._check_reused(slot, row.start)
        result = self._runner.execute(plan)
        tokens = iter(result.token_ids)
        for row in plan.rows:
            slot, end = self._slots[row.slot], row.start + row.count
            if row.sample:
                slot.tokens[end:] = [next(tokens)]
            self._learn(slot, row.start, end)
        return result

    def _key(self, group: int, block: int) -> Tensor:
        cache = self._runner.cache
        return next(cache.layers[layer].key[block] for layer in self._last_first if cache.group_of[layer] == group)

    @property
    def _last_first(self) -> range:
        return range(len(self._runner.cache.layers) - 1, -1, -1)

    def _check_reused(self, slot: _Slot, start: int) -> None:
        assert start % BLOCK_SIZE == 0, "only whole blocks are reused"
        for place in range(start // BLOCK_SIZE):
            tokens = tuple(slot.tokens[: (place + 1) * BLOCK_SIZE])
            assert (slot.salt, tokens) in self._written, "it was never computed for these tokens and this salt"
            for group, table in enumerate(slot.tables):
                if (block := table[place]) is not None:
                    expected = self._known.keys[group, tokens]
                    assert torch.allclose(self._key(group, block), expected, atol=KV_TOLERANCE), "it holds other tokens"
                    self._known.reused[group] += 1

    def _learn(self, slot: _Slot, start: int, end: int) -> None:
        for place in range(start // BLOCK_SIZE, end // BLOCK_SIZE):
            tokens = tuple(slot.tokens[: (place + 1) * BLOCK_SIZE])
            self._written.add((slot.salt, tokens))
            for group, table in enumerate(slot.tables):
                block = table[place]
                assert block is not None, "what is computed is held"
                key = self._key(group, block)
                known = self._known.keys.setdefault((group, tokens), key.clone())
                assert torch.allclose(known, key, atol=KV_TOLERANCE), "it depends on more than its tokens"


class RealHarness(Harness):
    """A run of a trace on the real executor.

    Args:
        model, mode, seed: as of Harness.
        runner: that computes.
        known: of the runner's model.
    """

    def __init__(self, model: Model, mode: Mode, seed: int, runner: Runner, known: Known) -> None:
        self._runner = runner
        self._known = known
        super().__init__(model, mode, seed)

    def make_device(self, epoch: int) -> Device:
        """See Harness. A new epoch has new memory; what the old one left is poisoned as free."""
        return RealExecutor(self._runner, self._known, self.salts)


@dataclass(frozen=True)
class Solo:
    """A request, and what it gets alone."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    tokens: list[int]
    finish: FinishReason


def solo_runs(executor: Executor, count: int, seed: int) -> list[Solo]:
    """Requests with their answers, computed one by one: whole prompts, no cache, no neighbours.

    Those whose answer hangs on a near tie are left out.
    """
    draw = random.Random(seed)
    trunks = [[draw.randrange(VOCAB) for _ in range(draw.randint(12, 32))] for _ in range(2)]
    # Of the same few blocks in any order: what a block holds depends on what stands before it.
    phrases = [[draw.randrange(VOCAB) for _ in range(BLOCK_SIZE)] for _ in range(3)]
    trunks += [[token for _ in range(draw.randint(3, 8)) for token in draw.choice(phrases)] for _ in range(6)]
    made: list[Solo] = []
    while len(made) < count:
        prompt = _prompt(draw, trunks)
        made += _solo(draw, executor, prompt, seed=1000 * seed + len(made))
    return made


def _prompt(draw: random.Random, trunks: Sequence[list[int]]) -> list[int]:
    """Often a beginning that others have too, cut at a block border or near it."""
    trunk = draw.choice(trunks)
    cut = draw.randint(0, len(trunk))
    if draw.random() < 0.5:
        cut = cut // BLOCK_SIZE * BLOCK_SIZE
    tail = [draw.randrange(VOCAB) for _ in range(draw.choice([0, 0, 1, draw.randint(1, 8)]))]
    return trunk[:cut] + tail or [draw.randrange(VOCAB)]


def _solo(draw: random.Random, executor: Executor, prompt: list[int], seed: int) -> list[Solo]:
    """One request, or none when it hangs on a near tie."""
    soft = draw.random() < 0.4
    most = draw.randint(1, min(20, MOST_TOKENS - len(prompt)))
    params = SamplingParams(
        seed=seed,
        temperature=draw.choice([0.7, 1.0]) if soft else 0.0,
        top_p=draw.choice([1.0, 0.9]) if soft else 1.0,
        top_k=draw.choice([0, 20]) if soft else 0,
        max_tokens=most,
        min_tokens=min(most, draw.choice([0, 0, 0, 4])),
        stop_token_ids=tuple(draw.sample(range(VOCAB), draw.choice([0, 0, 8]))),
        ignore_eos=draw.random() < 0.3,
        logprobs=4,
    )
    tokens, clear = alone(executor, prompt, params, seed)
    stops = ends_of(params)
    ends = [place for place, token in enumerate(tokens) if token in stops and place + 1 >= params.min_tokens]
    if ends:
        tokens = tokens[: ends[0] + 1]
    return [Solo(prompt, params, seed, tokens, "stop" if ends else "length")] if all(clear[: len(tokens)]) else []


def runner_of(executor: Executor) -> Runner:
    """Its runner, which measures nothing."""
    assert isinstance(executor.runner, Runner)
    return executor.runner


def ends_of(params: SamplingParams) -> set[int]:
    """Ids that end a request, once it has min_tokens."""
    return set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))


def alone(executor: Executor, prompt: list[int], params: SamplingParams, seed: int) -> tuple[list[int], list[bool]]:
    """All max_tokens tokens of a request without neighbours, and for each whether rounding cannot have decided it."""
    runner = runner_of(executor)
    out: deque[Launched] = deque()
    driver = Driver(
        lambda plan: out.append(runner.launch(plan)),
        lambda: runner.collect(out.popleft()),
        groups=executor.ready.kv_groups,
        block_size=BLOCK_SIZE,
    )
    assert params.max_tokens is not None
    job = Job(prompt, params.max_tokens, replace(params, logprobs=VOCAB), seed)
    driver.run([job])
    choices = [
        Choice(entry, params, seed, len(prompt) + place, ends_of(params) if place < params.min_tokens else set())
        for place, entry in enumerate(job.logprobs)
    ]
    return job.output, [choice.is_clear(token) for choice, token in zip(choices, job.output, strict=True)]


def _pool(draw: random.Random, group: KvGroup) -> KvGroup:
    """A tiny pool in the memory of this one: it holds one sequence, or a few."""
    steady = group.steady_blocks(BLOCK_SIZE)
    whole = MOST_TOKENS // BLOCK_SIZE
    sizes = [whole, whole + 5, 40] if steady is None else [steady, steady + 1, 2 * steady, 6 * steady]
    return KvGroup(group.window, min(group.num_blocks, draw.choice(sizes)))


def real_trace(seed: int, pool: Sequence[Solo], groups: Sequence[KvGroup], requests: int = 8) -> Trace:
    """A random trace of requests of the pool: tiny devices, bursts, aborts, resumptions.

    Args:
        seed: of the trace.
        pool: of requests.
        groups: of the executor; the trace's pools are parts of these.
        requests: of the trace.
    """
    draw = random.Random(seed)
    model = Model(
        vocab=VOCAB,
        eos=EOS,
        groups=tuple(_pool(draw, group) for group in groups),
        block_size=BLOCK_SIZE,
        max_num_seqs=draw.choice([2, 3, 5, MOST_ROWS]),
        max_num_batched_tokens=draw.choice([3, 8, 20, 64]),
        max_model_len=128,
    )
    ticks: list[Tick] = []
    keys: list[RequestKey] = []
    waiting = draw.sample(list(pool), requests)
    while waiting:
        burst = [waiting.pop() for _ in range(min(draw.choice([0, 1, 2, 5]), len(waiting)))]
        arrivals = [_request(draw, solo) for solo in burst]
        keys += [request.key for request in arrivals]
        aborts = [key for key in keys if draw.random() < 0.02]
        ticks.append(Tick(draw.choice([0.0, 0.01, 3.0]), arrivals, aborts))
    return Trace(model, ticks)


def _request(draw: random.Random, solo: Solo) -> Request:
    made = draw.randrange(len(solo.tokens)) if draw.random() < 0.15 else 0
    submit = Submit(
        request_id=f"r{solo.seed}",
        prompt=pack_ids(solo.prompt),
        params=solo.params,
        priority=draw.choice([0, 0, 1, 5, -3]),
        cache_salt=draw.choice([None, None, None, "salt", "s"]),
        output=pack_ids(solo.tokens[:made]),
    )
    return Request((draw.choice(CLIENTS), submit.request_id), submit, solo.tokens[made:], solo.finish)
