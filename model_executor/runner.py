"""One step: slots filled, batch built, forward pass, sampling, result."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_core.wire.executor import StepPlan, StepResult
from model_executor.batch import BatchIndex, BatchInputs, StepRows, build_index, to_inputs
from model_executor.errors import PlanInvalid
from model_executor.kv_cache import KVCache
from model_executor.models.decoder import Decoder
from model_executor.sampler import Logprobs, SampleRows, sample
from model_executor.slots import NO_IDS, Slots

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Launched:
    """A step on its way: its tokens may still be computed by the device.

    Attributes:
        epoch, step: of the plan.
        token_ids: int64 [S] on the device; None when no row samples.
        logprobs: likewise on the device, None when no row asked.
        started_ns: monotonic clock.
    """

    epoch: int
    step: int
    token_ids: Tensor | None
    logprobs: Logprobs | None
    started_ns: int


class Runner:
    """Runs plans one after the other. `launch` does not wait for the device, `collect` does.

    Args:
        model: with its weights.
        cache: of all runtime layers.
        slots: per-sequence state.
        sample_vocab_size: ids from it on are never sampled.
        max_num_batched_tokens: most tokens of a plan.

    Attributes:
        cache: as given.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, slots: Slots, *, sample_vocab_size: int, max_num_batched_tokens: int
    ) -> None:
        self._model = model
        self.cache = cache
        self._slots = slots
        self._sample_vocab_size = sample_vocab_size
        self._max_tokens = max_num_batched_tokens

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
        index = build_index(rows, self._slots.block_table, self.cache.block_size)
        batch = to_inputs(index, self._slots.gather(index))
        token_ids, logprobs = self._step(batch, index)
        return Launched(plan.epoch, plan.step, token_ids, logprobs, started_ns)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step and give its result."""
        token_ids = [] if launched.token_ids is None else launched.token_ids.tolist()
        logprobs = None if launched.logprobs is None else launched.logprobs.to_wire(len(token_ids))
        return StepResult(launched.epoch, launched.step, token_ids, logprobs, launched.started_ns, time.monotonic_ns())

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
        table = np.full((1, blocks), self.cache.scratch_block, dtype=np.int32)
        slots, starts, counts = (np.array([value], dtype=np.int64) for value in (0, start, count))
        index = build_index(StepRows(slots, starts, counts, np.ones(1, dtype=np.bool_)), table, self.cache.block_size)
        device = self.cache[0].key.device
        batch = to_inputs(index, torch.zeros(count, dtype=torch.int64, device=device))
        logits = self._logits(batch)
        for greedy in (True, False):
            sample(logits, _warm_up_rows(greedy), self._sample_vocab_size)[0].tolist()

    def _step(self, batch: BatchInputs, index: BatchIndex) -> tuple[Tensor | None, Logprobs | None]:
        if not len(index.sample_index):
            self._model(batch, self.cache)
            return None, None
        rows = self._slots.sampling(index)
        token_ids, logprobs = sample(self._logits(batch), rows, self._sample_vocab_size)
        self._slots.write(index, token_ids)
        return token_ids, logprobs

    def _logits(self, batch: BatchInputs) -> Tensor:
        """float32 [S, V] of the rows that sample."""
        hidden: Tensor = self._model(batch, self.cache)
        return self._model.logits(hidden[batch.sample_index])


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
