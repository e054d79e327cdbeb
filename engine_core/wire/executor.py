"""Messages between the engine core and the executor.

The executor opens with ExecutorHello, sends Progress while it loads, then ExecutorReady or ExecutorFatal. From then on
the core sends StepPlans and gets one StepResult for each, in order. The executor runs plans strictly one after the
other, so a plan may rely on what the plans before it wrote: KV blocks, and the tokens they sampled.

Token table: the executor keeps for each slot the tokens of the sequence that occupies it. SlotFill writes the known
ones; each sampled token is written at position `start + count` of its row. A row's input is
`tokens[slot, start:start + count]`, so a decode row needs no token on the wire and may be planned before the token it
feeds on has come back.

KV groups: layers that need a token's KV equally long share a pool of blocks and a block table for each slot. A layer
with a window never reads, for a row that starts at `start`, anything before position `start - window + 1`; the core
takes blocks back that lie before it. The entries of a table keep their places: entry i is for the tokens
i * block_size .. (i + 1) * block_size - 1, whether entries before it are still held or not. An entry that was taken
back is never read.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from engine_core.wire.client import Progress, TokenLogprobs
from engine_core.wire.reports import KernelChoice, LoadReport, Phase
from engine_core.wire.sampling import SamplingParams

# Plans that may be out at once; the blocks that a sequence needs depend on it.
MOST_PLANS_OUT: Final = 2


class KvGroup(Struct, frozen=True, array_like=True):
    """A pool of KV blocks and the layers it serves.

    Attributes:
        window: tokens that a query of these layers sees, its own included; None: all before it.
        num_blocks: the core may hand out 0 .. num_blocks - 1.
    """

    window: int | None
    num_blocks: int

    def steady_blocks(self, block_size: int) -> int | None:
        """Blocks that keep a sequence of any length going token by token, None without a window.

        That many hold the window of the oldest plan out and one token for each plan, wherever blocks begin.
        """
        if self.window is None:
            return None
        return -(-(self.window - 1 + MOST_PLANS_OUT - 1) // block_size) + 1

    def most_tokens(self, block_size: int) -> int | None:
        """Tokens of the longest sequence it can serve; None: of any length."""
        steady = self.steady_blocks(block_size)
        return None if steady is not None and steady <= self.num_blocks else self.num_blocks * block_size


class SlotFill(Struct, frozen=True, array_like=True):
    """A sequence takes a slot, in full; whatever the slot held before is forgotten.

    Attributes:
        slot: 0 .. max_num_seqs - 1.
        token_ids: prompt and output so far, packed little-endian int32.
        prompt_len: how many of them are prompt.
        params: sampling and stopping; the executor needs the former and min_tokens.
        seed: of the request; params.seed or the one that the core drew.
        blocks: for each KV group the block table so far (with a prefix hit the shared blocks lead it).
        held_from: for each KV group the place of the first of these blocks; what comes before is not held.
            Empty: 0 for all.
    """

    slot: int
    token_ids: bytes
    prompt_len: int
    params: SamplingParams
    seed: int
    blocks: list[list[int]]
    held_from: list[int] = []


class Row(Struct, frozen=True, array_like=True):
    """One sequence's share of a step: positions start .. start + count - 1 are computed.

    Attributes:
        slot: the sequence.
        start: tokens computed before.
        count: tokens computed now, at least 1.
        blocks: for each KV group block ids to append to the slot's table before the step; empty: none for any.
        sample: whether the logits of the last position give a token, written at position start + count.
    """

    slot: int
    start: int
    count: int
    blocks: list[list[int]]
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
        max_model_len, vocab_size, dtype, kv_cache_dtype, device: as resolved from configuration and checkpoint.
        kv_groups: at least one, with distinct windows.
        max_num_batched_tokens: most tokens a plan may hold.
        load, kernels, startup_s: reports; seconds per phase.
        memory: bytes by purpose ("weights", "kv_cache", "buffers").
        graphs: how steps of single tokens run: as CUDA graphs, on static buffers, or as they are.
    """

    epoch: int
    max_model_len: int
    vocab_size: int
    dtype: str
    kv_cache_dtype: str
    device: str
    kv_groups: list[KvGroup]
    max_num_batched_tokens: int
    load: LoadReport
    kernels: list[KernelChoice]
    startup_s: dict[Phase, float]
    memory: dict[str, int]
    graphs: KernelChoice | None = None

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(group.num_blocks for group in self.kv_groups)


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
