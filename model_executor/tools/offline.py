"""The production executor without its processes: brought up as the server does, driven by plans made here.

Model, loader, kernels, cache, runner and sampler are the server's own; only who makes the plans differs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import torch
from msgspec import Struct

from engine_core.wire.client import TokenLogprobs
from engine_core.wire.codec import pack_ids
from engine_core.wire.config import (
    CacheOptions,
    EngineConfig,
    ExecutorOptions,
    ModelOptions,
    SchedulerOptions,
    TextFacts,
)
from engine_core.wire.evidence import Environment, PlanIdentity
from engine_core.wire.executor import ExecutorReady, Row, SlotFill, StepPlan, StepResult
from engine_core.wire.reports import KernelChoice
from engine_core.wire.sampling import SamplingParams
from model_executor.attention.dispatch import KernelTable
from model_executor.models.reader import read_spec
from model_executor.startup import Executor, PhaseClock, bring_up
from model_executor.weights.layer_plan import plan_layers

BLOCK_SIZE: Final = 16
EPOCH: Final = 1


class OfflineOptions(Struct, frozen=True):
    """What to bring up.

    Attributes:
        folder: of the model.
        layers, allow_missing_classes, dtype, quantization, kv_cache_dtype: as of `tercet serve`.
        device: likewise.
        length: tokens of the longest sequence.
        sequences: that run at once.
        sample_vocab: ids that may be sampled; None: all.
        threads: on CPU; None: the cores.
        eager: no step is padded or replayed, so that hooks see every step.
    """

    folder: Path
    layers: str = "full"
    allow_missing_classes: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8"] = "none"
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    length: int = 128
    sequences: int = 8
    sample_vocab: int | None = None
    threads: int | None = None
    eager: bool = False


@dataclass
class Job:
    """A sequence on its way.

    Attributes:
        prompt: its token ids.
        count: tokens to generate.
        token_ids, logprobs: what came.
    """

    prompt: Sequence[int]
    count: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0

    @property
    def done(self) -> bool:
        """Whether all its tokens are there."""
        return len(self.token_ids) == self.count


class Offline:
    """An executor and the plans for it.

    Args:
        options: what to bring up.
        table: kernels to choose from; None: all.

    Attributes:
        executor: that was brought up.
        spec: of the whole checkpoint.

    Raises:
        ModelRefused: as the server would refuse it.
    """

    def __init__(self, options: OfflineOptions, table: KernelTable | None = None) -> None:
        self._options = options
        self.spec = read_spec(options.folder, ModelOptions())
        length = min(options.length, self.spec.max_model_len)
        self._sequence_blocks = -(-length // BLOCK_SIZE)
        config = self._config(length)
        spec = read_spec(options.folder, config.model)
        clock = PhaseClock(time.monotonic(), _silent)
        self.executor: Executor = bring_up(config, spec, EPOCH, clock, _silent, table=table)
        self._step = 0

    def _config(self, length: int) -> EngineConfig:
        options = self._options
        return EngineConfig(
            model=ModelOptions(
                model=str(options.folder),
                dtype=options.dtype,
                quantization=options.quantization,
                max_model_len=length,
                layers=options.layers,
                allow_missing_classes=options.allow_missing_classes,
            ),
            cache=CacheOptions(
                block_size=BLOCK_SIZE,
                num_kv_blocks=self._sequence_blocks * options.sequences,
                kv_cache_dtype=options.kv_cache_dtype,
            ),
            scheduler=SchedulerOptions(max_num_seqs=options.sequences),
            executor=ExecutorOptions(device=options.device, cpu_threads=options.threads, enforce_eager=options.eager),
            text=TextFacts(vocab_size=options.sample_vocab),
        )

    @property
    def identity(self) -> PlanIdentity:
        """What runs."""
        ready = self.executor.ready
        sources = self.executor.plan.sources
        return PlanIdentity(
            architecture=self.spec.architecture,
            revision=ready.load.revision,
            blocks=len(self.spec.layers),
            layer_map=list(sources),
            classes=list(plan_layers(self.spec, sources).classes),
            dtype=ready.dtype,
            kv_cache_dtype=ready.kv_cache_dtype,
            sample_vocab=self.sample_vocab,
            quantization=self._options.quantization,
        )

    @property
    def sample_vocab(self) -> int:
        """Ids that may be sampled."""
        return min(self.spec.vocab_size, self._options.sample_vocab or self.spec.vocab_size)

    @property
    def environment(self) -> Environment:
        """Where it runs."""
        ready = self.executor.ready
        device = self.executor.model.embedding.weight.device.type
        return Environment(
            python=platform.python_version(),
            torch=str(torch.__version__),
            machine=processor() if device == "cpu" else ready.device,
            device=device,
            threads=torch.get_num_threads(),
            kernels=[f"{choice.operator}: {choice.problem}: {choice.chosen}" for choice in _choices(ready)],
        )

    def generate(self, prompts: Sequence[Sequence[int]], count: int, chunk: int) -> list[Job]:
        """Continue the prompts greedily, `sequences` of them at once, prompts in chunks beside running answers.

        Args:
            prompts: none empty, all with room for `count` tokens.
            count: tokens of each.
            chunk: most tokens of a prompt in a step.
        """
        jobs: list[Job] = []
        for first in range(0, len(prompts), self._options.sequences):
            batch = [Job(prompt, count) for prompt in (prompts[first:][: self._options.sequences])]
            jobs += batch
            while not all(job.done for job in batch):
                self._advance(batch, chunk)
        return jobs

    def force(self, token_ids: Sequence[int], prompt_len: int, chunk: int) -> None:
        """Compute a known sequence: its prompt in chunks, the rest token by token as a running answer does.

        Args:
            token_ids: of the sequence.
            prompt_len: of its prompt, at least 1.
            chunk: most tokens of the prompt in a step.
        """
        borders = [*range(0, prompt_len, chunk), *range(prompt_len, len(token_ids) + 1)]
        fills = [self.fill(token_ids)]
        for start, end in pairwise(borders):
            self.step(fills, [Row(0, start, end - start, [], False)])
            fills = []

    def step(self, fills: list[SlotFill], rows: list[Row]) -> StepResult:
        """Run one plan."""
        self._step += 1
        return self.executor.runner.execute(StepPlan(EPOCH, self._step, fills, rows))

    def _blocks(self, slot: int) -> list[list[int]]:
        """The slot's table of each KV group: its share of the pool, again and again where a window needs no more."""
        shares = [pool // self._options.sequences for pool in self.executor.cache.pools]
        return [[slot * share + place % share for place in range(self._sequence_blocks)] for share in shares]

    def fill(self, token_ids: Sequence[int], slot: int = 0) -> SlotFill:
        """A slot taken by a greedy sequence of known tokens, with all the blocks it may need."""
        params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
        return SlotFill(slot, pack_ids(token_ids), len(token_ids), params, 0, self._blocks(slot))

    def _advance(self, jobs: Sequence[Job], chunk: int) -> None:
        """One step: every sequence that is not done gives its next token, or computes its next chunk."""
        fills: list[SlotFill] = []
        rows: list[Row] = []
        sampling: list[Job] = []
        for slot, job in enumerate(jobs):
            if job.done:
                continue
            if not job.computed:
                fills.append(self.fill(job.prompt, slot))
            left = len(job.prompt) + len(job.token_ids) - job.computed
            count = min(left, chunk)
            rows.append(Row(slot, job.computed, count, [], count == left))
            job.computed += count
            if count == left:
                sampling.append(job)
        result = self.step(fills, rows)
        for job, token, logprobs in zip(sampling, result.token_ids, result.logprobs or (), strict=True):
            assert logprobs is not None
            job.token_ids.append(token)
            job.logprobs.append(logprobs)


def _choices(ready: ExecutorReady) -> list[KernelChoice]:
    return [*ready.kernels, *([] if ready.graphs is None else [ready.graphs])]


def processor() -> str:
    """Name of the processor, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.machine()


def _silent(*_: object) -> None:
    """Progress that nobody watches."""
