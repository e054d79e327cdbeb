"""What the scheduler counts, and how that is shown."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from engine_core.sequence import Sequence
from engine_core.wire.client import FinishReason, RejectCode


class SchedulerStatus(Struct, frozen=True):
    """The part of wire.client.Status that only the scheduler knows; names and meanings are those of Status."""

    running: int
    waiting: int
    waiting_by_reason: dict[str, int]
    oldest_wait_s: float
    kv_blocks_total: int
    kv_blocks_used: int
    finished: dict[str, int]
    rejected: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int


class Counters:
    """Counters since the core started; none ever falls.

    Attributes:
        finished: requests ended, by reason; rejected: submissions refused, by code.
        starts: sequences that got a slot, resumed ones included.
        prompt_tokens, cached_tokens: of requests when a step first holds them; a request that is aborted before
            counts in neither.
        generation_tokens: sampled and kept. preemptions: rows that lost their blocks to others.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache when a request first starts, and found.
    """

    def __init__(self) -> None:
        self.finished: Counter[FinishReason] = Counter()
        self.rejected: Counter[RejectCode] = Counter()
        self.starts = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def note_start(self, seq: Sequence, found: int, *, first: bool, caching: bool) -> None:
        """A sequence has started with `found` tokens out of the prefix cache."""
        self.starts += 1
        if not first:
            return
        self.prompt_tokens += seq.prompt_len
        self.cached_tokens += seq.cached_tokens
        if caching:
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += found
