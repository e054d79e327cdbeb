"""Which tokens are computed in the next step.

One rule, no phases. Each request has `computed` and `total` tokens (engine_core.sequence); a step spends a budget of
tokens on bringing the former up to the latter: first for rows that run, then for preempted requests, then for waiting
ones. Chunked prefill, decode and recompute after a preemption all fall out of it. In each step

    every running row gets at least one token, unless it lacks a KV block,
    no prompt gets more than its chunk while others wait,
    prompts together get a part of the budget while others generate, so that the step stays short, and
    while one more request could start, running prompts leave it a share of the budget.
"""

from __future__ import annotations

from operator import le, sub
from typing import Final

from engine_core.admission import Limits
from engine_core.flight import Draft
from engine_core.policy import BYPASS_S, MAX_BYPASS, BatchGate, MixedShare, RetryEstimate
from engine_core.roster import Lacking, Roster
from engine_core.sequence import Sequence, Status
from engine_core.wire.config import SchedulerOptions

# One part in so many of the budget is kept for a request that could start.
START_SHARE: Final = 4


class Planner:
    """Builds one step after the other from a roster.

    Args:
        roster: the live requests; starting and preempting happens there.
        options: of the configuration.
        limits: what the executor settled.

    Attributes:
        chunk_cap: tokens of one prompt in a step while others wait.
        lacks_capacity: whether, in the latest step, a row lacked blocks, or a queued request rows or blocks.
        retry: the rate of starts.
    """

    def __init__(self, roster: Roster, options: SchedulerOptions, limits: Limits) -> None:
        self._roster = roster
        self._budget = limits.max_num_batched_tokens
        self.chunk_cap: Final = options.long_prefill_token_threshold or max(1, self._budget // 2)
        self._mixed = MixedShare(self._budget, options.mixed_prefill_token_threshold)
        self._displaces = options.scheduling_policy == "priority" and options.batching == "continuous"
        self._windows = any(group.window is not None for group in limits.kv_groups)
        self._gate = BatchGate(options.batching)
        self.retry = RetryEstimate()
        self.lacks_capacity = False

    def plan(self, now: float) -> Draft:
        """The next step; its rows are launched, and it has none when nothing can be computed."""
        roster = self._roster
        self.lacks_capacity = False
        if roster.trial:
            draft = Draft(roster.flights.next_step(), self._budget)
            self._plan_alone(roster.trial[0], draft, now)
            return draft
        self._gate.refresh(batch_alive=self._batch_alive())
        if self._displaces:
            self._make_way()
        rows = [seq for seq in roster.running.in_order() if not seq.exhausted]
        draft = Draft(roster.flights.next_step(), self._budget_beside(rows))
        self._plan_running(rows, draft)
        self._plan_starts(draft, now)
        self.lacks_capacity |= not roster.has_row()
        return draft

    def note_end(self) -> None:
        """A running request has ended."""
        self._gate.close()

    def _batch_alive(self) -> bool:
        """Whether rows, plans or preempted requests (in a static queue they lead) are left of what was started."""
        first = self._roster.queue.first()
        preempted = first is not None and first.status is Status.PREEMPTED
        return bool(self._roster.running) or bool(self._roster.flights) or preempted

    def _plan_alone(self, seq: Sequence, draft: Draft, now: float) -> None:
        """A step for a request on trial: if the executor dies of it, it is known of which request."""
        if seq.status is not Status.RUNNING:
            self.lacks_capacity = self._start(seq, draft, now) is not None
        elif not seq.exhausted:
            todo = self._roster.kv.room(seq, min(seq.total - seq.computed, draft.budget))
            blocks = self._roster.kv.grow(seq, seq.computed + todo)
            if todo and blocks is not None:
                draft.add(seq, todo, blocks)

    # Rows that run.

    def _budget_beside(self, rows: list[Sequence]) -> int:
        """Tokens of a step with these rows: all there may be, unless some of the rows generate."""
        generating = sum(seq.total - seq.computed == 1 for seq in rows)
        if not generating:
            return self._budget
        waiting = len(rows) - generating + (len(self._roster.queue) if self._roster.has_row() else 0)
        # Each row that runs gets a token, prompts too.
        return min(self._budget, max(len(rows), generating + self._mixed.tokens(generating, waiting)))

    def _plan_running(self, rows: list[Sequence], draft: Draft) -> None:
        kept = self._kept_for_start(draft.budget)
        cap = 0
        for index, seq in enumerate(rows):
            if seq.status is not Status.RUNNING:
                continue
            todo = seq.total - seq.computed
            if todo > 1:
                cap = cap or self._cap(rows, kept)
                spare = draft.budget - (len(rows) - index - 1) - kept
                todo = max(1, min(todo, spare, cap))
            if self._windows:
                todo = self._roster.kv.room(seq, todo)
            blocks = self._blocks_for(seq, seq.computed + todo) if todo else None
            if blocks is not None:
                draft.add(seq, todo, blocks)

    def _cap(self, rows: list[Sequence], kept: int) -> int:
        """Tokens that a running prompt may have: all, unless a second one among `rows` or a start waits."""
        prompts = sum(seq.total - seq.computed > 1 for seq in rows)
        return self.chunk_cap if kept or prompts > 1 else self._budget

    def _kept_for_start(self, budget: int) -> int:
        """Tokens that running prompts leave for the queue: none when nobody in it could start."""
        roster = self._roster
        first = roster.queue.first()
        if first is None or not roster.has_row() or not self._gate.admits(first):
            return 0
        return max(1, budget // START_SHARE) if roster.kv.has_spare(roster.margin()) else 0

    def _blocks_for(self, seq: Sequence, tokens: int) -> list[list[int]] | None:
        """Blocks that a running row needs to hold `tokens` tokens, if need be from others; None: not in this step.

        Each preemption sets free one block of each group at least, now or behind the fence: the last block of a
        sequence is its own. While some of each group that lacks any are on their way, nobody else is preempted. The
        victim stands behind the row in order, or is the row itself, so it has no row in this draft.
        """
        roster = self._roster
        while (blocks := roster.kv.grow(seq, tokens)) is None:
            self.lacks_capacity = True
            short = zip(roster.kv.short(seq, tokens), roster.fence.gain, strict=True)
            victim = roster.running.victim() if any(lack > 0 and not gain for lack, gain in short) else None
            if victim is None:
                return None
            roster.preempt(victim)
            if victim is seq:
                return None
        return blocks

    def _make_way(self) -> None:
        """Rows that are less urgent than the first in the queue yield when it lacks a row or blocks, if that helps."""
        roster = self._roster
        first = roster.queue.first()
        yielding = [] if first is None else roster.running.yielding_to(first)
        if first is None or not yielding:
            return
        rows = 0 if roster.has_row() or roster.fence else 1
        lacking = list(map(sub, roster.kv.lacking(first, roster.margin()), roster.fence.gain))
        chosen: list[Sequence] = []
        for seq in yielding:
            if len(chosen) >= rows and max(lacking) <= 0:
                break
            chosen.append(seq)
            lacking = list(map(sub, lacking, roster.kv.gain(seq.held)))
        if len(chosen) >= rows and max(lacking) <= 0:
            for seq in chosen:
                roster.preempt(seq)

    # Queued requests.

    def _plan_starts(self, draft: Draft, now: float) -> None:
        while draft.budget > 0:
            head = self._next_to_start(now)
            if head is None:
                break
            lacking = self._start(head, draft, now)
            if lacking is not None:
                self.lacks_capacity = True
                self._let_by(head, lacking.blocks, draft, now)
                break
        if draft.budget > 0 and self._roster.running:
            self._gate.close()

    def _next_to_start(self, now: float) -> Sequence | None:
        queue = self._roster.queue
        for seq in (queue.pick(self._roster.counters.starts, now), queue.first()):
            if seq is not None and self._gate.admits(seq):
                return seq
        return None

    def _start(self, seq: Sequence, draft: Draft, now: float) -> Lacking | None:
        """Start a queued sequence with its first row; None when done."""
        roster = self._roster
        fill = roster.start(seq, now)
        if isinstance(fill, Lacking):
            return fill
        self.retry.note_start(now)
        draft.fills.append(fill)
        cap = self.chunk_cap if roster.queue and roster.has_row() else self._budget
        count = roster.kv.room(seq, min(seq.total - seq.computed, draft.budget, cap))
        blocks = roster.kv.grow(seq, seq.computed + count)
        assert count, "a sequence of which nothing is out has room for a token"
        assert blocks is not None, "it has been admitted"
        draft.add(seq, count, blocks)
        return None

    def _let_by(self, head: Sequence, lacking: tuple[int, ...], draft: Draft, now: float) -> None:
        """Others may start before a head that lacks blocks, but only so often and so long, and not when what it lacks
        is on its way."""
        roster = self._roster
        if all(map(le, lacking, roster.fence.gain)):
            return
        if head.blocked_at is None:
            head.blocked_at = now
        for seq in roster.queue.others(head):
            spent = head.passed >= MAX_BYPASS or now - head.blocked_at >= BYPASS_S
            if spent or draft.budget <= 0 or not roster.has_row():
                return
            if self._gate.admits(seq) and self._start(seq, draft, now) is None:
                head.passed += 1
