"""Messages between the engine core and the executor.

The executor opens with ExecutorHello, sends Progress while it loads, then ExecutorReady or ExecutorFatal. From then on
the core sends StepPlans and gets one StepResult for each, in order. The executor runs plans strictly one after the
other, so a plan may rely on what the plans before it wrote: KV blocks, and the tokens they sampled.

Token table: the executor keeps for each slot the tokens of the sequence that occupies it. SlotFill writes the known
ones; each sampled token is written at position `start + count` of its row. A row's input is
`tokens[slot, start:start + count]`, so a decode row needs no token on the wire and may be planned before the token it
feeds on has come back.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from engine_core.wire.client import Progress, TokenLogprobs
from engine_core.wire.reports import KernelChoice, LoadReport, Phase
from engine_core.wire.sampling import SamplingParams


class SlotFill(Struct, frozen=True, array_like=True):
    """A sequence takes a slot, in full; whatever the slot held before is forgotten.

    Attributes:
        slot: 0 .. max_num_seqs - 1.
        token_ids: prompt and output so far, packed little-endian int32.
        prompt_len: how many of them are prompt.
        params: sampling and stopping; the executor needs the former and min_tokens.
        seed: of the request; params.seed or the one that the core drew.
        blocks: the block table so far (with a prefix hit the shared blocks lead it).
    """

    slot: int
    token_ids: bytes
    prompt_len: int
    params: SamplingParams
    seed: int
    blocks: list[int]


class Row(Struct, frozen=True, array_like=True):
    """One sequence's share of a step: positions start .. start + count - 1 are computed.

    Attributes:
        slot: the sequence.
        start: tokens computed before.
        count: tokens computed now, at least 1.
        blocks: block ids to append to the slot's table before the step.
        sample: whether the logits of the last position give a token, written at position start + count.
    """

    slot: int
    start: int
    count: int
    blocks: list[int]
    sample: bool


class StepPlan(Struct, frozen=True, array_like=True, tag="plan"):
    """One forward pass. Each slot stands in at most one row.

    Attributes:
        epoch: incarnation of the executor the plan is for.
        step: counts up by one within an epoch, from 1.
        fills: slots taken by a sequence, before the step.
        rows: what is computed.
    """

    epoch: int
    step: int
    fills: list[SlotFill]
    rows: list[Row]


class StepResult(Struct, frozen=True, array_like=True, tag="result"):
    """What a plan gave.

    Attributes:
        epoch, step: of the plan.
        token_ids: one for each row with `sample`, in the plan's order.
        logprobs: parallel to token_ids, None where not asked for; None as a whole when no row asked.
        started_ns, ended_ns: monotonic clock of the executor (one machine: comparable with the core's).
        bucket: rows that the step was padded to; 0: it ran as it is.
    """

    epoch: int
    step: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    started_ns: int
    ended_ns: int
    bucket: int = 0


class Shutdown(Struct, frozen=True, array_like=True, tag="shutdown"):
    """End after the plans already sent."""


class ExecutorHello(Struct, frozen=True, array_like=True, tag="executor_hello"):
    """First message of an executor."""

    protocol: int
    config_hash: str
    epoch: int
    pid: int


class ExecutorReady(Struct, frozen=True, array_like=True, tag="executor_ready"):
    """The executor takes plans.

    Attributes:
        max_model_len, vocab_size, dtype, device: as resolved from configuration and checkpoint.
        num_kv_blocks: blocks the core may hand out (0 .. num_kv_blocks - 1).
        max_num_batched_tokens: most tokens a plan may hold.
        load, kernels, startup_s: reports; seconds per phase.
        memory: bytes by purpose ("weights", "kv_cache", "buffers").
        graphs: how steps of single tokens run: as CUDA graphs, on static buffers, or as they are.
    """

    epoch: int
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_kv_blocks: int
    max_num_batched_tokens: int
    load: LoadReport
    kernels: list[KernelChoice]
    startup_s: dict[Phase, float]
    memory: dict[str, int]
    graphs: KernelChoice | None = None


class ExecutorFatal(Struct, frozen=True, array_like=True, tag="executor_fatal"):
    """The executor ends.

    Attributes:
        code: "refused": the model or an option cannot be honoured, starting again will not help; "internal": all else.
        message: one line naming the culprit.
    """

    code: Literal["refused", "internal"]
    message: str


CoreToExecutor = StepPlan | Shutdown
ExecutorToCore = ExecutorHello | Progress | ExecutorReady | StepResult | ExecutorFatal
