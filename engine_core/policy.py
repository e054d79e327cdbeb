"""Who is next: the order of waiting requests, of victims, and how far anyone may be passed over.

Order of the queue (smaller first):
    fcfs      preempted before waiting, then arrival
    priority  priority, then preempted before waiting, then arrival
    static    preempted before waiting (they belong to the batch that runs), then as the policy says

Nobody starves:
    ageing    under `priority`, of AGEING_SHARE starts one goes to the request that came first, if it has waited for
              AGEING_S; so the n-th oldest starts after at most n * AGEING_SHARE starts.
    bypass    when the first lacks blocks, others may start before it, MAX_BYPASS times or for BYPASS_S seconds,
              whichever ends sooner; then blocks that come free are kept for it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Final, Literal

from engine_core.sequence import Sequence, Status

AGEING_S: Final = 10.0
AGEING_SHARE: Final = 4
MAX_BYPASS: Final = 16
BYPASS_S: Final = 5.0
# Requests looked at behind a first that lacks blocks: so many in order, and as many more by turns.
BYPASS_WINDOW: Final = 16
# For each sequence that generates prompts get one part in so many of the budget.
MIXED_ROWS: Final = 112

Policy = Literal["fcfs", "priority"]
Batching = Literal["continuous", "static"]
Rank = tuple[int, int, int]


def victim_rank(seq: Sequence, policy: Policy) -> tuple[int, int]:
    """Rows are served in this order and give up their blocks in the reverse: first the latest of the least urgent."""
    return (seq.priority if policy == "priority" else 0, seq.order)


class RunningRows:
    """The running sequences in order of victim_rank, kept sorted as they come and go."""

    def __init__(self, policy: Policy) -> None:
        self._policy: Policy = policy
        self._ranked: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._ranked)

    def add(self, seq: Sequence) -> None:
        """It runs from now on."""
        insort(self._ranked, (victim_rank(seq, self._policy), seq), key=lambda entry: entry[0])

    def remove(self, seq: Sequence) -> None:
        """It runs no more."""
        index = bisect_left(self._ranked, victim_rank(seq, self._policy), key=lambda entry: entry[0])
        assert self._ranked[index][1] is seq, f"request {seq.key[1]} does not run"
        del self._ranked[index]

    def in_order(self) -> list[Sequence]:
        """All of them now, first to be served first."""
        return [seq for _, seq in self._ranked]

    def victim(self) -> Sequence | None:
        """Who gives up its blocks first; pinned ones never do."""
        return next((seq for _, seq in reversed(self._ranked) if not seq.pinned), None)

    def yielding_to(self, urgent: Sequence) -> list[Sequence]:
        """Those who make way for a more urgent request, first victim first."""
        found: list[Sequence] = []
        for _, seq in reversed(self._ranked):
            if seq.priority <= urgent.priority:
                break
            if not (seq.pinned or seq.aged):
                found.append(seq)
        return found


class WaitingQueue:
    """Waiting and preempted sequences in order.

    Args:
        policy, batching: which order.
    """

    def __init__(self, policy: Policy, batching: Batching) -> None:
        self._policy: Policy = policy
        self._static = batching == "static"
        self._ranked: list[tuple[Rank, Sequence]] = []
        self._by_age: list[tuple[int, Sequence]] = []
        self._cursor = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._ranked)

    def push(self, seq: Sequence) -> None:
        """Add a waiting or preempted sequence."""
        insort(self._ranked, (self._rank(seq), seq), key=lambda entry: entry[0])
        insort(self._by_age, (seq.order, seq), key=lambda entry: entry[0])
        self.tokens += seq.prompt_len

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence; its status is still the one it was pushed with."""
        index = bisect_left(self._ranked, self._rank(seq), key=lambda entry: entry[0])
        assert self._ranked[index][1] is seq, f"request {seq.key[1]} is not queued"
        del self._ranked[index]
        del self._by_age[bisect_left(self._by_age, seq.order, key=lambda entry: entry[0])]
        self.tokens -= seq.prompt_len

    def in_order(self) -> list[Sequence]:
        """All of them now, first to start first."""
        return [seq for _, seq in self._ranked]

    def first(self) -> Sequence | None:
        """The first in order."""
        return self._ranked[0][1] if self._ranked else None

    def oldest(self) -> Sequence | None:
        """The one that arrived first."""
        return self._by_age[0][1] if self._by_age else None

    def pick(self, starts: int, now: float) -> Sequence | None:
        """Who is to start next.

        Args:
            starts: how many have been started so far.
            now: in seconds.
        """
        oldest = self.oldest()
        if oldest is None or self._policy == "fcfs" or starts % AGEING_SHARE:
            return self.first()
        if now - oldest.arrival < AGEING_S:
            return self.first()
        return oldest

    def others(self, head: Sequence) -> list[Sequence]:
        """A bounded number of requests that may start before a head that lacks blocks, in order.

        The first BYPASS_WINDOW stand in it each time; of the rest, each stands in it once in
        len(self) / BYPASS_WINDOW calls.
        """
        near = self._ranked[: BYPASS_WINDOW + 1]
        far = len(self._ranked) - len(near)
        if far > 0:
            start = self._cursor % far
            self._cursor = start + BYPASS_WINDOW
            from_ = len(near) + start
            near = near + self._ranked[from_ : from_ + BYPASS_WINDOW]
        return [seq for _, seq in near if seq is not head]

    def _rank(self, seq: Sequence) -> Rank:
        behind = seq.status is not Status.PREEMPTED
        urgency = seq.priority if self._policy == "priority" else 0
        return (behind, urgency, seq.order) if self._static else (urgency, behind, seq.order)


class BatchGate:
    """Who may start: anyone (continuous), or only the members of one batch at a time (static).

    A static batch takes members from when nothing runs until the queue, the rows or the blocks give no more, or one of
    its members has ended. After that only members that were preempted come in, until all have ended.

    Args:
        batching: which of the two.
    """

    def __init__(self, batching: Batching) -> None:
        self._static = batching == "static"
        self._open = True

    def refresh(self, *, batch_alive: bool) -> None:
        """Before a step: a batch of which nothing is left makes room for the next one."""
        self._open = self._open or not batch_alive

    def close(self) -> None:
        """The batch takes no more members."""
        self._open = not self._static

    def admits(self, seq: Sequence) -> bool:
        """Whether the sequence may start now."""
        return self._open or seq.status is Status.PREEMPTED


class MixedShare:
    """How many tokens prompts get in a step beside sequences that generate, whose next tokens wait for them.

    The more sequences generate, the longer is a step without prompts and the less a longer one is felt; so prompts get
    a number of tokens for each of them. While more requests wait for their first token than for their next one, as in a
    burst, the former matter more: prompts get half of the budget.

    Args:
        budget: tokens of a step.
        fixed: how many, whoever waits; 0: as said, and a sixteenth of the budget at least.
    """

    def __init__(self, budget: int, fixed: int) -> None:
        self._budget = budget
        self._fixed = fixed

    def tokens(self, generating: int, waiting: int) -> int:
        """Of prompts in the next step; at least 1.

        Args:
            generating: sequences that generate.
            waiting: those whose prompts are being read, and requests that could start.
        """
        if self._fixed:
            return self._fixed
        most = self._budget // 2
        wanted = most if waiting > generating else max(self._budget * generating // MIXED_ROWS, self._budget // 16)
        return max(1, min(wanted, most))


class RetryEstimate:
    """When a refused client should come back: the time in which a quarter of the queue has started."""

    _KEPT: Final = 64
    _LEAST_S: Final = 1.0
    _MOST_S: Final = 60.0

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=self._KEPT)

    def note_start(self, now: float) -> None:
        """A request has started."""
        self._starts.append(now)

    def seconds(self, waiting: int, now: float) -> float:
        """From the rate of the latest starts; between 1 and 60 seconds."""
        if not self._starts:
            return self._LEAST_S
        each = (now - self._starts[0]) / len(self._starts)
        return min(max(each * waiting / 4, self._LEAST_S), self._MOST_S)
