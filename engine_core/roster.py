"""Who is live and what each one holds: rows, slots, KV blocks. Every transition of a request is one method here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from engine_core.admission import Limits
from engine_core.counters import Counters
from engine_core.flight import Fence, Flights, Held
from engine_core.kv_manager import KVManager
from engine_core.policy import RunningRows, WaitingQueue
from engine_core.sequence import RequestKey, Sequence, Status
from engine_core.wire.client import FinishReason
from engine_core.wire.config import CacheOptions, SchedulerOptions
from engine_core.wire.executor import SlotFill


class Lacking(Struct, frozen=True):
    """Why a sequence could not start: so many `blocks` more must be available, by KV group. Empty: it waits for a row
    or for its own results.
    """

    blocks: tuple[int, ...]


class Roster:
    """All live requests. A request is either running or queued, and holds a slot and blocks exactly while it runs.

    What it held when it stopped running stays untouched until the last plan with a row of it is back.

    Args:
        options, cache: of the configuration.
        limits: what the executor settled.
        epoch: of the executor.

    Attributes:
        live: all requests; running, queue: the two parts of them.
        trial: requests under suspicion of killing executors; while there are any, only the first of them gets rows.
        kv: the blocks; fence: what plans that are out may still touch; flights: those plans.
    """

    def __init__(self, options: SchedulerOptions, cache: CacheOptions, limits: Limits, epoch: int) -> None:
        self._limits = limits
        self._caching = cache.shares_prefixes
        self._contiguous = cache.kv_cache_reservation == "contiguous"
        # Never more rows than tokens in a step: each row gets one in each step.
        self._max_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self.live: dict[RequestKey, Sequence] = {}
        self.running = RunningRows(options.scheduling_policy)
        self.queue = WaitingQueue(options.scheduling_policy, options.batching)
        self.counters = Counters()
        self.trial: deque[Sequence] = deque()
        self._reset(epoch)

    def _reset(self, epoch: int) -> None:
        limits = self._limits
        self.kv = KVManager(
            limits.kv_groups,
            limits.block_size,
            most_tokens=limits.max_num_batched_tokens,
            prefix_caching=self._caching,
            whole=limits.room if self._contiguous else None,
        )
        self.flights = Flights(epoch, limits.vocab_size)
        self.fence = Fence(len(limits.kv_groups))
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))

    def has_row(self) -> bool:
        """Whether one more sequence may run."""
        return len(self.running) < self._max_rows and bool(self._slots)

    def margin(self) -> int:
        """Blocks that stay available when a sequence starts: each running row can grow by one before one must yield."""
        return len(self.running)

    def enqueue(self, seq: Sequence) -> None:
        """A new request waits."""
        self.live[seq.key] = seq
        self.queue.push(seq)

    def start(self, seq: Sequence, now: float) -> SlotFill | Lacking:
        """Give a queued sequence a row, a slot and its blocks; or say what it lacks, with nothing changed."""
        if seq.in_flight or not self.has_row():
            return Lacking(())
        lacking, found = self.kv.admit(seq, self.margin())
        if lacking:
            return Lacking(lacking)
        seq.aged = seq.aged or (seq is self.queue.oldest() and seq is not self.queue.first())
        self.queue.remove(seq)
        first = not seq.started
        slot = self._slots.pop()
        seq.start(slot, found, now)
        self.running.add(seq)
        self.counters.note_start(seq, found, first=first, caching=self._caching)
        return SlotFill(
            slot,
            seq.tokens.tobytes(),
            seq.prompt_len,
            seq.params,
            seq.seed,
            [holding.blocks.copy() for holding in seq.held],
            [holding.freed for holding in seq.held] if any(holding.freed for holding in seq.held) else [],
        )

    def preempt(self, seq: Sequence) -> None:
        """Take row, slot and blocks from a running sequence; it is queued ahead of those that never ran."""
        self._leave(seq)
        seq.preempt()
        self.queue.push(seq)
        self.counters.preemptions += 1

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """The one way out, from any status; what of it is in flight is dropped when it comes."""
        if seq.status is Status.RUNNING:
            self._leave(seq)
        else:
            self.queue.remove(seq)
        if seq in self.trial:
            self.trial.remove(seq)
        seq.finish()
        del self.live[seq.key]
        self.counters.finished[reason] += 1

    def lift_fence(self, step: int) -> None:
        """A plan is back: what it was the last to touch may be used again."""
        self.kv.landed(step)
        for held in self.fence.lift(step):
            self.kv.free(held.blocks)
            self._slots.append(held.slot)

    def acquit(self, seq: Sequence) -> None:
        """The one on trial came further than it ever was; it makes room for the next one."""
        if not self.trial or self.trial[0] is not seq:
            return
        self.trial.popleft()
        if self.trial and seq.status is Status.RUNNING:
            self._leave(seq)
            seq.preempt(counted=False)
            self.queue.push(seq)

    def restart(self, epoch: int, trial: Iterable[RequestKey] = ()) -> None:
        """Another executor: nothing that is out comes back, no block holds anything, all slots are free."""
        for seq in self.live.values():
            seq.forget_flight()
        for seq in self.running.in_order():
            self.running.remove(seq)
            self.kv.detach(seq)
            seq.preempt(counted=False)
            self.queue.push(seq)
        self.trial = deque(self.live[key] for key in trial if key in self.live)
        self._reset(epoch)

    def resize(self, limits: Limits) -> None:
        """The pool has another size; nothing runs and no plan is out."""
        assert not self.running, "requests run"
        assert not self.flights, "plans are out"
        self._limits = limits
        self._reset(self.flights.epoch)

    def violations(self) -> list[str]:
        """Every invariant that does not hold; O(pool + tokens held)."""
        running, queued = self.running.in_order(), self.queue.in_order()
        found = self.kv.violations(running, [held.blocks for held in self.fence])
        for seq in self.live.values():
            found += seq.violations()
        slots = [seq.slot for seq in running if seq.slot is not None]
        slots += [*self._slots, *(held.slot for held in self.fence)]
        if sorted(slots) != list(range(self._limits.max_num_seqs)):
            found.append(f"slots: free, held back and running do not make up all: {slots}")
        if {seq.key for seq in running + queued} != self.live.keys() or len(running + queued) != len(self.live):
            found.append("requests: running and queued do not make up the live ones")
        if any((seq.status is Status.RUNNING) != (seq in running) for seq in self.live.values()):
            found.append("requests: running ones and those with that status differ")
        if self.queue.tokens != sum(seq.prompt_len for seq in queued):
            found.append("queue: its count of tokens is wrong")
        return found + self.flights.violations(self.live.values())

    def _leave(self, seq: Sequence) -> None:
        assert seq.slot is not None, f"request {seq.key[1]} does not run"
        self.running.remove(seq)
        blocks = self.kv.detach(seq)
        if seq.in_flight:
            self.fence.hold(seq.last_step, Held(blocks, seq.slot, self.kv.gain(blocks)))
        else:
            self.kv.free(blocks)
            self._slots.append(seq.slot)
