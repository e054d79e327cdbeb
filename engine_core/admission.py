"""Whether a submission can be taken at all: every value in range, and room for it in the model and the pool."""

from __future__ import annotations

from array import array

from msgspec import Struct

from engine_core.wire.client import RejectCode, Submit
from engine_core.wire.codec import unpack_ids
from engine_core.wire.executor import KvGroup


class Limits(Struct, frozen=True):
    """What the executor and the configuration settled.

    Attributes:
        max_model_len: tokens of prompt and output together.
        vocab_size: token ids stay below.
        kv_groups: the pools of KV blocks, at least one.
        block_size: tokens a block.
        max_num_seqs: slots of the executor.
        max_num_batched_tokens: tokens of a step.
        eos_token_ids: ids that end a sequence.
    """

    max_model_len: int
    vocab_size: int
    kv_groups: tuple[KvGroup, ...]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def pool_tokens(self) -> int:
        """Tokens of one sequence that every pool can serve."""
        bounds = (group.most_tokens(self.block_size) for group in self.kv_groups)
        return min((bound for bound in bounds if bound is not None), default=self.max_model_len)

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of all pools."""
        return sum(group.num_blocks for group in self.kv_groups)

    @property
    def held_tokens(self) -> int:
        """Computed tokens, of all sequences together, that the pools can hold at most."""
        full = [group.num_blocks * self.block_size for group in self.kv_groups if group.window is None]
        return min(full, default=self.max_num_seqs * self.pool_tokens)

    @property
    def room(self) -> int:
        """Tokens one sequence can hold, by the model and by the pool: asking for more output is cut to it."""
        return min(self.max_model_len, self.pool_tokens)


class Refusal(Struct, frozen=True):
    """Why a submission is not taken; the fields are those of wire.client.Rejected."""

    code: RejectCode
    message: str
    field: str | None = None
    limit: int | None = None
    given: int | None = None
    retry_after_s: float | None = None


class Tokens(Struct, frozen=True):
    """The tokens of a submission that is in order: prompt and earlier output."""

    ids: array[int]
    prompt_len: int


def examine(submit: Submit, limits: Limits) -> Tokens | Refusal:
    """Unpack and check a submission against the limits. Queue limits and duplicate ids are the scheduler's matter."""
    for field, packed in (("prompt", submit.prompt), ("output", submit.output)):
        if len(packed) % 4:
            message = f"{field}: {len(packed)} bytes, no multiple of 4"
            return Refusal(code="invalid", message=message, field=field, limit=4, given=len(packed))
    ids, output = unpack_ids(submit.prompt), unpack_ids(submit.output)
    prompt_len = len(ids)
    ids.extend(output)
    return _length(ids, prompt_len, limits) or _parameters(submit, ids, prompt_len, limits) or Tokens(ids, prompt_len)


def _length(ids: array[int], prompt_len: int, limits: Limits) -> Refusal | None:
    if prompt_len == 0:
        return Refusal(code="invalid", message="prompt: 0 tokens, at least 1", field="prompt", limit=1, given=0)
    given = len(ids)
    if given + 1 > limits.max_model_len:
        limit = limits.max_model_len - 1
        return Refusal(
            code="context_length",
            message=f"prompt: {given} tokens, at most {limit}: the model's length is {limits.max_model_len}, "
            "of which one is for the output",
            field="prompt",
            limit=limit,
            given=given,
        )
    if given + 1 > limits.pool_tokens:
        blocks = limits.pool_tokens // limits.block_size
        limit = limits.pool_tokens - 1
        return Refusal(
            code="never_fits",
            message=f"prompt: {given} tokens, at most {limit}: the KV pool holds {blocks} blocks "
            f"of {limits.block_size} tokens, of which one token is for the output",
            field="prompt",
            limit=limit,
            given=given,
        )
    return None


def _parameters(submit: Submit, ids: array[int], prompt_len: int, limits: Limits) -> Refusal | None:
    params = submit.params
    made = len(ids) - prompt_len
    if params.max_tokens is not None and params.max_tokens <= made:
        return Refusal(
            code="invalid",
            message=f"max_tokens: {params.max_tokens}, at least {made + 1}: {made} tokens have been made before",
            field="max_tokens",
            limit=made + 1,
            given=params.max_tokens,
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        return Refusal(
            code="invalid",
            message=f"min_tokens: {params.min_tokens}, at most max_tokens, {params.max_tokens}",
            field="min_tokens",
            limit=params.max_tokens,
            given=params.min_tokens,
        )
    return (
        _ids_in_range("prompt", ids[:prompt_len], limits.vocab_size)
        or _ids_in_range("output", ids[prompt_len:], limits.vocab_size)
        or _ids_in_range("stop_token_ids", array("i", params.stop_token_ids), limits.vocab_size)
    )


def _ids_in_range(field: str, ids: array[int], vocab_size: int) -> Refusal | None:
    if not ids:
        return None
    worst = max(ids) if min(ids) >= 0 else min(ids)
    if 0 <= worst < vocab_size:
        return None
    return Refusal(
        code="invalid",
        message=f"{field}: token id {worst}, the vocabulary has 0 to {vocab_size - 1}",
        field=field,
        limit=vocab_size - 1,
        given=worst,
    )
