"""One request inside the core: its tokens, how far they are computed, and its status.

    waiting --start--> running --preempt--> preempted --start--> running
    any of them --finish--> finished

The methods of Sequence are the only place where a status or a count of tokens changes.

Counts, in tokens:
    computed  planned to be computed, plans in flight included: the KV cache holds these once the plans have run
    total     known tokens (prompt and output) plus `assumed`, those that plans in flight are to sample
    computed <= total always; a row that computes up to `total` samples the next token.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import Final

from engine_core.kv_group import Holding
from engine_core.stop import StopRules
from engine_core.wire.client import RequestTimes
from engine_core.wire.sampling import SamplingParams

RequestKey = tuple[bytes, str]

# A request that lost its blocks this often is not taken as a victim again; see KVManager.admit.
MAX_PREEMPTIONS: Final = 4


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_NEXT: Final[dict[Status, frozenset[Status]]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Sequence:
    """The state of one request.

    Args:
        key: client and request id.
        order: arrival number, unique and rising.
        tokens: prompt, and output of an earlier incarnation of the core.
        prompt_len: how many of them are prompt.
        params, seed: of the request; the seed is settled here for good.
        rules: when it ends.
        priority: smaller is more urgent.
        salt: prefixes are shared only among equal salts.
        now: time of arrival, in seconds.
        earlier: where its seconds went before it arrived here, if an earlier incarnation of the core had it.

    Attributes:
        status, tokens, computed, assumed: as above.
        peak: the largest `computed` that has come back, over all lives: progress is what raises it.
        continued: it arrived with output.
        in_flight: plans in flight that hold a row of this sequence; last_step: the latest of them.
        slot: of the executor, while running.
        cached_tokens: prompt tokens that came out of the prefix cache when it first started.
        preemptions: how often it lost its blocks.
        aged: it was started out of turn because it had waited long; more urgent requests do not displace it.
        passed: how many were started while it, first in the queue, lacked blocks; since blocked_at.
        held, hashes, committed: of the KVManager alone: what it holds of each KV group, the hash of each full block
            as far as computed, and how many leading blocks are settled in the prefix cache.
    """

    __slots__ = (
        "aged",
        "arrival",
        "assumed",
        "blocked_at",
        "cached_tokens",
        "committed",
        "computed",
        "continued",
        "earlier",
        "first_token_at",
        "hashes",
        "held",
        "in_flight",
        "key",
        "last_step",
        "last_token_at",
        "order",
        "params",
        "passed",
        "peak",
        "preemptions",
        "priority",
        "prompt_len",
        "rules",
        "salt",
        "seed",
        "slot",
        "started_at",
        "status",
        "tokens",
    )

    def __init__(
        self,
        *,
        key: RequestKey,
        order: int,
        tokens: array[int],
        prompt_len: int,
        params: SamplingParams,
        seed: int,
        rules: StopRules,
        priority: int,
        salt: str | None,
        now: float,
        earlier: RequestTimes | None = None,
    ) -> None:
        self.key = key
        self.order = order
        self.tokens = tokens
        self.prompt_len = prompt_len
        self.params = params
        self.seed = seed
        self.rules = rules
        self.priority = priority
        self.salt = salt
        self.arrival = now
        self.earlier = earlier
        self.continued = len(tokens) > prompt_len
        self.status = Status.WAITING
        self.computed = 0
        self.assumed = 0
        self.peak = 0
        self.in_flight = 0
        self.last_step = 0
        self.slot: int | None = None
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0
        self.aged = False
        self.passed = 0
        self.blocked_at: float | None = None
        self.held: list[Holding] = []
        self.hashes: list[bytes] = []
        self.committed = 0

    @property
    def total(self) -> int:
        """Tokens known and assumed."""
        return len(self.tokens) + self.assumed

    @property
    def exhausted(self) -> bool:
        """Whether the last token it may hold is on its way: there is nothing more to plan."""
        return len(self.tokens) + self.assumed >= self.rules.max_total

    @property
    def pinned(self) -> bool:
        """Whether it has been preempted as often as it may be."""
        return self.preemptions >= MAX_PREEMPTIONS

    @property
    def started(self) -> bool:
        """Whether a step has ever held it."""
        return self.started_at is not None

    def start(self, slot: int, computed: int, now: float) -> None:
        """It gets a slot, and blocks of which the first `computed` tokens are filled already."""
        assert self.in_flight == 0, "a sequence starts only when nothing of it is in flight"
        assert computed < len(self.tokens), "one token at least is computed, or nothing could be sampled"
        self._move(Status.RUNNING)
        self.slot = slot
        self.computed = computed
        self.blocked_at = None
        self.passed = 0
        if self.started_at is None:
            self.started_at = now
            self.cached_tokens = min(computed, self.prompt_len)

    def launch(self, count: int, step: int) -> bool:
        """A plan holds a row of `count` tokens; whether the row samples."""
        self.computed += count
        self.in_flight += 1
        self.last_step = step
        sample = self.computed == len(self.tokens) + self.assumed
        if sample:
            self.assumed += 1
        return sample

    def rewind(self) -> None:
        """The cache is off: for its next token all of its tokens are computed again, into the blocks it has."""
        self.computed = 0

    def land(self, end: int, *, sample: bool) -> bool:
        """The plan with the row that ends at position `end` has come back; whether the row brought news."""
        self.in_flight -= 1
        self.assumed -= sample
        assert 0 <= self.assumed <= self.in_flight
        if end <= self.peak:
            return False
        self.peak = end
        return True

    def accept(self, token: int, now: float) -> None:
        """A sampled token becomes known."""
        self.tokens.append(token)
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now

    def preempt(self, *, counted: bool = True) -> None:
        """It loses slot and blocks. Tokens in flight still count when they come; nothing restarts before that."""
        self._move(Status.PREEMPTED)
        self.slot = None
        self.computed = 0
        self.preemptions += counted

    def forget_flight(self) -> None:
        """What was in flight will never come back."""
        self.in_flight = 0
        self.assumed = 0

    def finish(self) -> None:
        """It has its last output."""
        self._move(Status.FINISHED)
        self.slot = None

    def times(self, now: float) -> RequestTimes:
        """Where its seconds went, up to its end."""
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        before = self.earlier or RequestTimes(0.0, 0.0, 0.0, 0)
        preemptions = before.preemptions + self.preemptions
        if self.continued:
            # Its first token came before: all since then is decode.
            return RequestTimes(before.queued, before.prefill, before.decode + last - self.arrival, preemptions)
        return RequestTimes(before.queued + started - self.arrival, first - started, last - first, preemptions)

    def violations(self) -> list[str]:
        """Which of its own invariants do not hold."""
        running = self.status is Status.RUNNING
        held = {
            "0 <= assumed <= in_flight": 0 <= self.assumed <= self.in_flight,
            "0 <= computed <= total": 0 <= self.computed <= self.total,
            "peak <= total": self.peak <= self.total,
            "total <= max_total": self.total <= self.rules.max_total,
            "a slot exactly while running": running == (self.slot is not None),
            "blocks exactly while running": running == bool(self.held),
            "nothing computed unless running": running or self.computed == 0,
            "passed >= 0": self.passed >= 0,
        }
        return [f"request {self.key[1]}: violated: {name}" for name, holds in held.items() if not holds]

    def _move(self, to: Status) -> None:
        assert to in _NEXT[self.status], f"request {self.key[1]}: {self.status.value} to {to.value}"
        self.status = to
