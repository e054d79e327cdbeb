"""The real executor under the harness of the modelled one: RAND on CPU, in this process."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
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
from tests.model.executor import Model
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
EOS: Final = tuple(range(5, VOCAB, 50))
BUCKETS: Final = (1, 2, 3, 5, 8)
# Two logits that are nearer than this may change places when a sum is done in another order.
NEAR_TIE: Final = 1e-3
TOP: Final = 4
KV_TOLERANCE: Final = 1e-4
# Finite, as everything in a cache is, and far from all that a model writes.
POISON: Final = 1e4


def bring_up_rand(folder: Path, buckets: tuple[int, ...] = ()) -> Executor:
    """The executor of a RAND folder; buckets are those of --cuda-graph-sizes."""
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
    blocks: list[int]


@dataclass
class Known:
    """What blocks of tokens look like in the cache, by all tokens up to their ends; checked wherever one is reused.

    Attributes:
        keys: of the last layer, [block_size, heads, head_dim].
        reused: blocks that were found again and compared.
    """

    keys: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    reused: int = 0


class RealExecutor:
    """A Runner that poisons free blocks, and checks that a reused block holds what its tokens say.

    Args:
        runner: that computes.
        known: shared by executors of one model.
    """

    def __init__(self, runner: Runner, known: Known) -> None:
        self._runner = runner
        self._known = known
        self._slots: dict[int, _Slot] = {}
        self._poisoned: frozenset[int] = frozenset()

    def poison(self, free: list[frozenset[int]]) -> None:
        """See Device."""
        fresh = free[0] - self._poisoned
        if fresh:
            places = torch.tensor(sorted(fresh))
            for layer in self._runner.cache.layers:
                layer.key.index_fill_(0, places, POISON)
                layer.value.index_fill_(0, places, POISON)
        self._poisoned = free[0]

    def run(self, plan: StepPlan) -> StepResult:
        """See Device."""
        for fill in plan.fills:
            self._slots[fill.slot] = _Slot(list(unpack_ids(fill.token_ids)), list(fill.blocks[0]))
        filled = {fill.slot for fill in plan.fills}
        for row in plan.rows:
            slot = self._slots[row.slot]
            slot.blocks += row.blocks[0] if row.blocks else []
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

    def _key(self, block: int) -> Tensor:
        return self._runner.cache.layers[-1].key[block]

    def _check_reused(self, slot: _Slot, start: int) -> None:
        assert start % BLOCK_SIZE == 0, "only whole blocks are reused"
        for place in range(start // BLOCK_SIZE):
            expected = self._known.keys[tuple(slot.tokens[: (place + 1) * BLOCK_SIZE])]
            assert torch.allclose(self._key(slot.blocks[place]), expected, atol=KV_TOLERANCE), "it holds other tokens"
            self._known.reused += 1

    def _learn(self, slot: _Slot, start: int, end: int) -> None:
        for place in range(start // BLOCK_SIZE, end // BLOCK_SIZE):
            name = tuple(slot.tokens[: (place + 1) * BLOCK_SIZE])
            key = self._key(slot.blocks[place])
            assert torch.allclose(self._known.keys.setdefault(name, key.clone()), key, atol=KV_TOLERANCE)


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
        return RealExecutor(self._runner, self._known)


@dataclass(frozen=True)
class Solo:
    """A request, and what it gets alone."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    tokens: list[int]
    finish: FinishReason


def solo_runs(runner: Runner, count: int, seed: int) -> list[Solo]:
    """Requests with their answers, computed one by one: whole prompts, no cache, no neighbours.

    Greedy ones whose answer hangs on a near tie are left out.
    """
    rng = random.Random(seed)
    trunks = [[rng.randrange(VOCAB) for _ in range(rng.randint(12, 32))] for _ in range(3)]
    made: list[Solo] = []
    while len(made) < count:
        prompt = _prompt(rng, trunks)
        made += _solo(rng, runner, prompt, seed=1000 * seed + len(made))
    return made


def _prompt(rng: random.Random, trunks: Sequence[list[int]]) -> list[int]:
    """Often a beginning that others have too, cut at a block border or near it."""
    trunk = rng.choice(trunks)
    cut = rng.randint(0, len(trunk))
    if rng.random() < 0.5:
        cut = cut // BLOCK_SIZE * BLOCK_SIZE
    tail = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, rng.randint(1, 8)]))]
    return trunk[:cut] + tail or [rng.randrange(VOCAB)]


def _solo(rng: random.Random, runner: Runner, prompt: list[int], seed: int) -> list[Solo]:
    """One request, or none when it hangs on a near tie."""
    soft = rng.random() < 0.4
    most = rng.randint(1, min(20, MOST_TOKENS - len(prompt)))
    params = SamplingParams(
        seed=seed,
        temperature=rng.choice([0.7, 1.0]) if soft else 0.0,
        top_p=rng.choice([1.0, 0.9]) if soft else 1.0,
        top_k=rng.choice([0, 20]) if soft else 0,
        max_tokens=most,
        min_tokens=min(most, rng.choice([0, 0, 0, 4])),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 8]))),
        ignore_eos=rng.random() < 0.3,
        logprobs=TOP,
    )
    tokens, near = _alone(runner, prompt, params, seed)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
    ends = [place for place, token in enumerate(tokens) if token in stops and place + 1 >= params.min_tokens]
    if ends:
        tokens = tokens[: ends[0] + 1]
    if not soft and any(near[: len(tokens)]):
        return []
    return [Solo(prompt, params, seed, tokens, "stop" if ends else "length")]


def _alone(runner: Runner, prompt: list[int], params: SamplingParams, seed: int) -> tuple[list[int], list[bool]]:
    """All max_tokens tokens, and where the likeliest ones are nearly alike."""
    out: deque[Launched] = deque()
    driver = Driver(
        lambda plan: out.append(runner.launch(plan)),
        lambda: runner.collect(out.popleft()),
        groups=[KvGroup(None, BLOCKS)],
        block_size=BLOCK_SIZE,
    )
    assert params.max_tokens is not None
    job = Job(prompt, params.max_tokens, params, seed)
    driver.run([job])
    leads = [
        min(high - low for high, low in zip(entry.top_logprobs, entry.top_logprobs[1:], strict=False))
        for entry in job.logprobs
    ]
    return job.output, [lead < NEAR_TIE for lead in leads]


def real_trace(seed: int, pool: Sequence[Solo], requests: int = 8) -> Trace:
    """A random trace of requests of the pool: tiny devices, bursts, aborts, resumptions."""
    rng = random.Random(seed)
    model = Model(
        vocab=VOCAB,
        eos=EOS,
        groups=(KvGroup(None, rng.choice([MOST_TOKENS // BLOCK_SIZE, MOST_TOKENS // BLOCK_SIZE + 5, 40])),),
        block_size=BLOCK_SIZE,
        max_num_seqs=rng.choice([2, 3, 5, MOST_ROWS]),
        max_num_batched_tokens=rng.choice([3, 8, 20, 64]),
        max_model_len=128,
    )
    ticks: list[Tick] = []
    keys: list[RequestKey] = []
    waiting = rng.sample(list(pool), requests)
    while waiting:
        burst = [waiting.pop() for _ in range(min(rng.choice([0, 1, 2, 5]), len(waiting)))]
        arrivals = [_request(rng, solo) for solo in burst]
        keys += [request.key for request in arrivals]
        aborts = [key for key in keys if rng.random() < 0.02]
        ticks.append(Tick(rng.choice([0.0, 0.01, 3.0]), arrivals, aborts))
    return Trace(model, ticks)


def _request(rng: random.Random, solo: Solo) -> Request:
    made = rng.randrange(len(solo.tokens)) if rng.random() < 0.15 else 0
    submit = Submit(
        request_id=f"r{solo.seed}",
        prompt=pack_ids(solo.prompt),
        params=solo.params,
        priority=rng.choice([0, 0, 1, 5, -3]),
        cache_salt=rng.choice([None, None, None, "salt", "s"]),
        output=pack_ids(solo.tokens[:made]),
    )
    return Request((rng.choice(CLIENTS), submit.request_id), submit, solo.tokens[made:], solo.finish)
