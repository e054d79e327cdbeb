"""Models with sliding windows through scheduler and runner together: contexts many times the window, in pools that
hold far less than a context. What the scheduler says is free is destroyed before every step.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch

from engine_core.readiness import limits_of
from engine_core.scheduler import Scheduler
from engine_core.wire.client import Submit
from engine_core.wire.codec import pack_ids
from engine_core.wire.config import CacheOptions, EngineConfig, ExecutorOptions, ModelOptions, SchedulerOptions
from engine_core.wire.executor import KvGroup, StepPlan
from engine_core.wire.sampling import SamplingParams
from model_executor.models.reader import read_spec
from model_executor.runner import Launched, Runner
from model_executor.startup import Executor, PhaseClock, bring_up
from tests.fixtures.families import SIZES, VOCAB, draw_weights, write_family
from tests.fixtures.reference import Continuation, Reference, prompts

LENGTH = 320
COUNT = 120
BLOCK_SIZE = 4
ROWS, BUDGET = 3, 24


def write_mistral(folder: Path) -> Path:
    """Every layer has a window of 8."""
    from transformers import AutoModelForCausalLM, MistralConfig

    config = MistralConfig(**{**SIZES, "sliding_window": 8, "head_dim": 16, "max_position_embeddings": LENGTH})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, 0.2, 1)
    model.save_pretrained(folder)
    return folder


def write_two_windows(folder: Path) -> Path:
    """Layers with windows of 5 beside such that see all."""
    return write_family(folder, "gemma3_text", max_position_embeddings=LENGTH)


WRITERS = {"mistral": write_mistral, "gemma3_text": write_two_windows}
POOLS = {
    # Windows of 8 and 5 take 3 blocks; two steps of 24 tokens 12.
    "mistral": [KvGroup(8, 3 * 3 + 12)],
    "gemma3_text": [KvGroup(None, 100), KvGroup(5, 3 * 3 + 12)],
}


@pytest.fixture(scope="module", params=WRITERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[family](tmp_path_factory.mktemp(family) / "model")


@pytest.fixture(scope="module")
def continuations(folder: Path) -> list[Continuation]:
    """Greedy continuations without near ties; prompt and answer are up to fifty windows long."""
    reference = Reference(folder)
    drawn = prompts(9, vocab=VOCAB, seed=4, shortest=60, longest=190)
    made = (reference.greedy(prompt, COUNT) for prompt in drawn)
    clear = list(islice((item for item in made if item.clear()), 5))
    assert len(clear) == 5
    return clear


class Together:
    """A scheduler and a runner, two plans ahead.

    Args:
        folder: of the model.
        caching: of prefixes.
        chunk: most tokens of a prompt in a step while others wait.
        buckets: of steps on static buffers.
        poison: what free blocks hold.

    Attributes:
        scheduler: of the engine.
        outputs: tokens of each request.
        cached: prompt tokens that each found in the prefix cache.
        most_held: for each KV group the most blocks that were not free.
    """

    def __init__(
        self,
        folder: Path,
        *,
        caching: bool,
        chunk: int = 0,
        buckets: tuple[int, ...] = (),
        poison: float = torch.nan,
    ) -> None:
        config = EngineConfig(
            model=ModelOptions(model=str(folder), max_model_len=LENGTH),
            cache=CacheOptions(block_size=BLOCK_SIZE, num_kv_blocks=100, enable_prefix_caching=caching),
            scheduler=SchedulerOptions(
                max_num_seqs=ROWS, max_num_batched_tokens=BUDGET, long_prefill_token_threshold=chunk
            ),
            executor=ExecutorOptions(device="cpu", cpu_threads=1, cuda_graph_sizes=buckets),
        )
        spec = read_spec(folder, config.model)
        clock = PhaseClock(time.monotonic(), lambda *_: None)
        self.executor: Executor = bring_up(config, spec, 1, clock, lambda *_: None)
        assert isinstance(self.executor.runner, Runner)
        self._runner = self.executor.runner
        limits = limits_of(config, self.executor.ready)
        self.scheduler = Scheduler(config.scheduler, config.cache, limits, epoch=1, random=random.Random(0))
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.most_held = [0] * len(limits.kv_groups)
        self._value = poison
        self._free = [frozenset[int]() for _ in limits.kv_groups]
        self._out: deque[Launched] = deque()

    def run(self, prompts: Sequence[Sequence[int]], count: int = COUNT) -> list[list[int]]:
        """The answers to the prompts, all submitted at once."""
        names = [f"r{len(self.outputs) + index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            assert self.scheduler.add((b"", name), Submit(name, pack_ids(prompt), params), 0.0) is None
            self.outputs[name] = []
        while self.scheduler.has_work():
            while (plan := self.scheduler.schedule(0.0)) is not None:
                self._launch(plan)
            self._land()
        assert self.scheduler.check() == []
        return [self.outputs[name] for name in names]

    def _launch(self, plan: StepPlan) -> None:
        self._poison()
        self._out.append(self._runner.launch(plan))

    def _land(self) -> None:
        for (_, name), output in self.scheduler.update(self._runner.collect(self._out.popleft()), 0.0):
            self.outputs[name] += output.token_ids
            if output.finish is not None:
                self.cached[name] = output.cached_tokens

    def _poison(self) -> None:
        """Blocks that have just been taken hold what is finite and wrong."""
        cache = self.executor.cache
        for group, free in enumerate(self.scheduler.free_blocks()):
            before, self._free[group] = self._free[group], free
            self.most_held[group] = max(self.most_held[group], cache.pools[group] - len(free))
            for value, blocks in ((self._value, free - before), (7.0, before - free)):
                for layer, of in zip(cache.layers, cache.group_of, strict=True):
                    if of == group and blocks:
                        layer.key[list(blocks)] = value
                        layer.value[list(blocks)] = value


def answers(continuations: list[Continuation]) -> list[list[int]]:
    return [list(item.token_ids) for item in continuations]


@pytest.mark.parametrize(
    ("buckets", "chunk"),
    [
        pytest.param((), 0, id="plain-0"),
        pytest.param((1, 3), 5, id="buffers-5"),
        pytest.param((), 5, id="plain-5", marks=pytest.mark.slow),
        pytest.param((1, 3), 0, id="buffers-0", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_reference(
    folder: Path, family: str, continuations: list[Continuation], chunk: int, buckets: tuple[int, ...]
) -> None:
    # Tables on static buffers keep what earlier steps left past a context; what they name must be finite there.
    poison = 1e9 if buckets else torch.nan
    together = Together(folder, caching=False, chunk=chunk, buckets=buckets, poison=poison)
    assert together.executor.ready.kv_groups == POOLS[family]
    assert together.run([item.prompt for item in continuations]) == answers(continuations)
    if family == "gemma3_text":
        # The pool that keeps whole sequences is the one that was short.
        assert together.scheduler.status(0.0).preemptions > 0
    # Three sequences of up to 300 tokens would fill 225 blocks.
    assert together.most_held[-1] <= 21


def test_prefix_hits_change_nothing(folder: Path, continuations: list[Continuation]) -> None:
    """A prompt and its answer are found, as far as their windows are still there."""
    together = Together(folder, caching=True)
    first = continuations[0]
    assert together.run([first.prompt], 12) == [list(first.token_ids[:12])]
    longer = (*first.prompt, *first.token_ids[:40])
    assert together.run([first.prompt, longer], 40) == [list(first.token_ids[:40]), list(first.token_ids[40:80])]
    assert min(together.cached["r1"], together.cached["r2"]) >= len(first.prompt) - BLOCK_SIZE
    assert together.run([item.prompt for item in continuations]) == answers(continuations)


def test_a_prompt_is_found_while_its_window_is_there(folder: Path, continuations: list[Continuation]) -> None:
    together = Together(folder, caching=True)
    prompt = list(continuations[0].prompt)
    assert together.run([prompt], 1) == [list(continuations[0].token_ids[:1])]
    assert together.run([prompt], 30) == [list(continuations[0].token_ids[:30])]
    assert together.cached["r1"] == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
