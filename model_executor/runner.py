"""One step: slots filled, batch built, forward pass, sampling, result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_core.wire.executor import StepPlan, StepResult
from model_executor.batch import BatchIndex, BatchInputs, SentIndex, StepRows, build_index, send, to_inputs
from model_executor.device import to_host
from model_executor.errors import PlanInvalid
from model_executor.graph import GraphRunner, GraphShape
from model_executor.kv_cache import KVCache
from model_executor.models.decoder import Decoder
from model_executor.native.program import Program
from model_executor.sampler import Logprobs, SampleRows, sample
from model_executor.slots import NO_IDS, Slots

WARM_UP_TOKENS = 16
# On a device that works by itself the next step is queued behind the one that runs.
DEVICE_DEPTH = 2


@dataclass(frozen=True)
class Launched:
    """A step on its way: its tokens may still be computed by the device.

    Attributes:
        epoch, step: of the plan.
        token_ids: int64 [S] on the host; None when no row samples.
        logprobs: likewise, None when no row asked.
        started_ns: monotonic clock.
        bucket: rows that the step is padded to; 0: it runs as it is.
        arrived: after it what lies on the host is complete; None: it is already.
    """

    epoch: int
    step: int
    token_ids: Tensor | None
    logprobs: Logprobs | None
    started_ns: int
    bucket: int = 0
    arrived: torch.cuda.Event | None = None


class Runner:
    """Runs plans one after the other. `launch` does not wait for the device, `collect` does.

    Args:
        model: with its weights.
        cache: of all runtime layers.
        slots: per-sequence state.
        sample_vocab_size: ids from it on are never sampled.
        max_num_batched_tokens: most tokens of a plan.
        buckets: row counts to pad steps of single tokens to, rising; none: all steps run as they are.
        program: the forward pass in one call. A hook on a module is to see every step: with one the modules run.

    Attributes:
        cache: as given.
        depth: steps that may be launched before the oldest of them is collected.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        slots: Slots,
        *,
        sample_vocab_size: int,
        max_num_batched_tokens: int,
        buckets: tuple[int, ...] = (),
        program: Program | None = None,
    ) -> None:
        self._model = model
        self._program = program
        self._hooks = [hooks for each in model.modules() for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self.cache = cache
        self._slots = slots
        self._sample_vocab_size = sample_vocab_size
        self._max_tokens = max_num_batched_tokens
        self._device = cache[0].key.device
        self.depth = 1 if self._device.type == "cpu" else DEVICE_DEPTH
        self._ended_ns = 0
        self._graphs: GraphRunner | None = None
        if buckets:
            width, (scratch, *others) = slots.block_tables[0].shape[1], cache.pools
            shape = GraphShape(buckets, width, cache.block_size, scratch, tuple(others))
            self._graphs = GraphRunner(self._forward, shape, self._device)

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch and collect.

        Raises:
            PlanInvalid: the plan contradicts the slots.
        """
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start a step; the next one may be launched before this one is collected.

        Raises:
            PlanInvalid: the plan contradicts the slots.
        """
        started_ns = time.monotonic_ns()
        for fill in plan.fills:
            self._slots.fill(fill)
        rows = self._slots.rows(plan.rows)
        tokens = int(rows.counts.sum())
        if tokens > self._max_tokens:
            raise PlanInvalid("tokens of a step", f"at most {self._max_tokens}", tokens)
        table, *others = self._slots.block_tables
        index = build_index(rows, table, self.cache.block_size, *others)
        sent = send(index, self._device)
        batch = to_inputs(index, self._slots.gather(sent), sent)
        token_ids, logprobs = self._step(batch, index, sent)
        return Launched(
            epoch=plan.epoch,
            step=plan.step,
            token_ids=None if token_ids is None else to_host(token_ids),
            logprobs=None if logprobs is None else logprobs.to_host(),
            started_ns=started_ns,
            bucket=0 if self._graphs is None or token_ids is None else self._graphs.bucket,
            arrived=self._mark(),
        )

    def _mark(self) -> torch.cuda.Event | None:
        """After all that was queued until now."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no annotation for it
        event.record()
        return event

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step and give its result. Steps are collected in the order of their launches, in any thread."""
        if launched.arrived is not None:
            launched.arrived.synchronize()
        token_ids = [] if launched.token_ids is None else launched.token_ids.tolist()
        logprobs = None if launched.logprobs is None else launched.logprobs.to_wire(len(token_ids))
        # A step that was queued behind another one starts when that one ends.
        started_ns, self._ended_ns = max(launched.started_ns, self._ended_ns), time.monotonic_ns()
        return StepResult(
            launched.epoch, launched.step, token_ids, logprobs, started_ns, self._ended_ns, launched.bucket
        )

    @property
    def captures(self) -> bool:
        """Whether there are graphs to make before the first step."""
        return self._graphs is not None and self._device.type != "cpu"

    def capture(self, progress: Callable[[int, int], None]) -> str | None:
        """Make the graphs for all buckets.

        Args:
            progress: called with graphs made and graphs to make.

        Returns:
            Why there will be none; None otherwise.
        """
        if self._graphs is None:
            return None
        self._graphs.warm_up(progress)
        return self._graphs.refused

    def explain(self) -> list[str]:
        """How many steps ran how, a line for each kind of step; nothing without buckets."""
        return [] if self._graphs is None else self._graphs.explain()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a prefill and a decode step, greedy and drawn, on the scratch block alone, so that the first request
        does not pay for what torch sets up on first use.
        """
        # The last block may reach beyond the last position, for which there is no rotation.
        length = self._slots.max_model_len
        count = min(WARM_UP_TOKENS, length, self._max_tokens)
        for start, tokens in ((0, count), (length - 1, 1)):
            self._scratch_step(start, tokens)

    def _scratch_step(self, start: int, count: int) -> None:
        blocks = -(-(start + count) // self.cache.block_size)
        # Each KV group has a scratch block behind its pool.
        table, *others = (np.full((1, blocks), scratch, dtype=np.int32) for scratch in self.cache.pools)
        slots, starts, counts = (np.array([value], dtype=np.int64) for value in (0, start, count))
        rows = StepRows(slots, starts, counts, np.ones(1, dtype=np.bool_))
        index = build_index(rows, table, self.cache.block_size, *others)
        batch = to_inputs(index, torch.zeros(count, dtype=torch.int64, device=self._device))
        logits = self._forward(batch)
        for greedy in (True, False):
            sample(logits, _warm_up_rows(greedy), self._sample_vocab_size)[0].tolist()

    def _step(self, batch: BatchInputs, index: BatchIndex, sent: SentIndex) -> tuple[Tensor | None, Logprobs | None]:
        if not len(index.sample_index):
            self._forward(batch)
            return None, None
        rows = self._slots.sampling(index)
        token_ids, logprobs = sample(self._logits(batch), rows, self._sample_vocab_size)
        self._slots.write(sent, token_ids)
        return token_ids, logprobs

    def _logits(self, batch: BatchInputs) -> Tensor:
        """float32 [S, V] of the rows that sample."""
        return self._forward(batch) if self._graphs is None else self._graphs.run(batch)

    def _forward(self, batch: BatchInputs) -> Tensor:
        """The same, of a batch as it is, in which perhaps no row samples."""
        if self._program is not None and not any(self._hooks):
            return self._program.run(batch)
        hidden: Tensor = self._model(batch, self.cache)
        # A head over no rows would still be dispatched, and show in profiles.
        return self._model.logits(hidden[batch.sample_index]) if len(batch.sample_index) else hidden[:0]


def _warm_up_rows(greedy: bool) -> SampleRows:
    one, half = np.ones(1, dtype=np.int64), np.full(1, 0.5)
    return SampleRows(
        greedy=np.array([greedy]),
        temperature=half,
        top_k=one * 8,
        top_p=half,
        min_p=half,
        seeds=one,
        positions=one,
        logprobs=one,
        banned_rows=NO_IDS,
        banned_ids=NO_IDS,
    )
