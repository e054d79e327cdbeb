"""The scheduler: requests in, plans out, results in, outputs out.

Pure: state and time in, data out; no clock, no I/O, no hidden randomness. Who holds what is the Roster's matter, what
a step computes the Planner's.

Plans overlap: up to `depth` are out at once. A plan is made before the result of the one before it is back; a row that
samples is assumed to yield one token, which the executor feeds to the next step by itself. Lengths are known ahead, so
only a stop token can make such a row needless: its token is dropped.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from engine_core.admission import Limits, Refusal, Tokens, examine
from engine_core.block_pool import Ledger
from engine_core.counters import SchedulerStatus
from engine_core.errors import Livelock
from engine_core.planner import Planner
from engine_core.roster import Roster
from engine_core.sequence import RequestKey, Sequence, Status
from engine_core.stop import StopRules
from engine_core.wire.client import FinishReason, Output, Submit, TokenLogprobs
from engine_core.wire.config import CacheOptions, SchedulerOptions
from engine_core.wire.executor import KvGroup, StepPlan, StepResult

__all__ = ["Ledger", "Limits", "Refusal", "RequestKey", "Scheduler", "SchedulerStatus"]

# Steps without progress that are still normal: computing the whole pool anew this many times, chunk by chunk, and some.
PATIENCE_POOLS: Final = 8
PATIENCE_STEPS: Final = 100


class Scheduler:
    """All live requests of one engine.

    Args:
        options, cache: of the configuration. Where they and `limits` name the same thing, `limits` holds.
        limits: what the executor settled.
        epoch: of the executor.
        random: draws the seeds of requests that bring none.

    Attributes:
        depth: plans that may be out at once.
    """

    def __init__(
        self, options: SchedulerOptions, cache: CacheOptions, limits: Limits, *, epoch: int, random: random.Random
    ) -> None:
        self.depth: Final = 2 if options.async_scheduling else 1
        self._options = options
        self._limits = limits
        self._forgets = not cache.enable_kv_cache
        self._random = random
        self._roster = Roster(options, cache, limits, epoch)
        self._planner = Planner(self._roster, options, limits)
        self._arrivals = 0
        self._idle_steps = 0
        chunk = min(self._planner.chunk_cap, self._roster.kv.chunk_tokens or limits.max_model_len)
        pool_steps = -(-limits.held_tokens // chunk)
        self._patience = PATIENCE_STEPS + PATIENCE_POOLS * pool_steps

    # Requests come and go.

    def add(self, key: RequestKey, submit: Submit, now: float) -> Refusal | None:
        """Take a request into the queue, or say why not; a refusal changes nothing."""
        taken = self._examine(key, submit, now)
        if isinstance(taken, Refusal):
            self._roster.counters.rejected[taken.code] += 1
            return taken
        params, eos = submit.params, self._limits.eos_token_ids
        self._arrivals += 1
        self._roster.enqueue(
            Sequence(
                key=key,
                order=self._arrivals,
                tokens=taken.ids,
                prompt_len=taken.prompt_len,
                params=params,
                seed=self._random.getrandbits(63) if params.seed is None else params.seed,
                rules=StopRules(params, eos, prompt_len=taken.prompt_len, room=self._limits.room),
                priority=submit.priority,
                salt=submit.cache_salt,
                now=now,
                earlier=submit.earlier,
            )
        )
        return None

    def _examine(self, key: RequestKey, submit: Submit, now: float) -> Tokens | Refusal:
        if key in self._roster.live:
            return Refusal(code="duplicate_id", message=f"request_id: {key[1]} is live already", field="request_id")
        taken = examine(submit, self._limits)
        if isinstance(taken, Refusal):
            return taken
        # What was taken once is not refused for lack of room.
        return taken if submit.resumed else self._queue_full(taken.prompt_len, now) or taken

    def _queue_full(self, tokens: int, now: float) -> Refusal | None:
        queue, options = self._roster.queue, self._options
        checks = (
            ("max_num_queued_reqs", options.max_num_queued_reqs, len(queue) + 1, "requests"),
            ("max_num_queued_tokens", options.max_num_queued_tokens, queue.tokens + tokens, "prompt tokens"),
        )
        for field, limit, given, unit in checks:
            # With an empty queue nobody is refused for his size alone: he would be refused for ever.
            if queue and given > limit:
                return Refusal(
                    code="queue_full",
                    message=f"{field}: {given} {unit} would wait, at most {limit}",
                    field=field,
                    limit=limit,
                    given=given,
                    retry_after_s=self._planner.retry.seconds(len(queue), now),
                )
        return None

    def abort(self, key: RequestKey, now: float) -> Output | None:
        """End a request at any moment; its last output, or None when it is not (or no longer) known."""
        seq = self._roster.live.get(key)
        return None if seq is None else self._finish(seq, "abort", now)

    def fail(self, key: RequestKey, message: str, now: float) -> Output | None:
        """Give a request up, alone; its last output says why. None when it is not known."""
        seq = self._roster.live.get(key)
        return None if seq is None else msgspec.structs.replace(self._finish(seq, "error", now), error=message)

    def abort_client(self, client: bytes, now: float) -> None:
        """End all requests of a client."""
        keys = [key for key in self._roster.live if key[0] == client]
        for key in keys:
            self.abort(key, now)

    def preempt(self, key: RequestKey) -> bool:
        """Take slot and blocks from a request; it resumes from its tokens, ahead of those that wait.

        Returns:
            Whether it was running.
        """
        seq = self._roster.live.get(key)
        if seq is None or seq.status is not Status.RUNNING:
            return False
        self._roster.preempt(seq)
        return True

    def restart(self, epoch: int, *, trial: Iterable[RequestKey] = ()) -> None:
        """The executor is replaced: live requests go back to the queue with the tokens they have, what was in flight
        is computed again. Results of the old one are stale from now on.

        Args:
            epoch: of the next executor.
            trial: requests that run alone, one after the other, until each has come further than it ever was.
        """
        self._roster.restart(epoch, trial)
        self._idle_steps = 0

    def resize(self, kv_groups: tuple[KvGroup, ...], now: float) -> list[tuple[RequestKey, Output]]:
        """The next executor has other numbers of KV blocks; before its first plan. Gives the ends of requests that
        fit no more.
        """
        limits = msgspec.structs.replace(self._limits, kv_groups=kv_groups)
        self._limits = limits
        self._roster.resize(limits)
        why = f"the executor that took over has room for {limits.pool_tokens} tokens, this request may need more"
        large = [key for key, seq in self._roster.live.items() if seq.rules.max_total > limits.pool_tokens]
        return [(key, ended) for key in large if (ended := self.fail(key, why, now)) is not None]

    def suspects(self) -> dict[RequestKey, int]:
        """The live requests of the oldest plan out, each with how many of its tokens were ever computed for good."""
        return {seq.key: seq.peak for seq in self._roster.flights.oldest() if seq.status is not Status.FINISHED}

    @property
    def limits(self) -> Limits:
        """What the executor settled."""
        return self._limits

    @property
    def trial(self) -> list[RequestKey]:
        """Requests that run alone for now."""
        return [seq.key for seq in self._roster.trial]

    @property
    def live(self) -> Collection[RequestKey]:
        """All requests that have not ended."""
        return self._roster.live.keys()

    # Steps leave and come back.

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None: `depth` plans are out, or there is nothing to compute now.

        Raises:
            Livelock: for many steps nothing has come forward although requests are live.
        """
        flights = self._roster.flights
        if len(flights) >= self.depth:
            return None
        draft = self._planner.plan(now)
        if draft.rows:
            flights.launch(draft.rows)
            if self._forgets:
                for seq in [seq for seq, row in draft.rows if row.sample]:
                    seq.rewind()
            return StepPlan(flights.epoch, draft.step, draft.fills, [row for _, row in draft.rows])
        if not flights:
            self._note_step(progress=False)
        return None

    def update(self, result: StepResult, now: float) -> list[tuple[RequestKey, Output]]:
        """What the oldest plan in flight brought: one Output for each request that got a token.

        Raises:
            StaleResult: the result is of another epoch or step; nothing has changed.
            ResultMismatch: the result does not fit its plan; nothing has changed.
            Livelock: for many steps nothing has come forward although requests are live.
        """
        roster = self._roster
        flight = roster.flights.land(result)
        outputs: list[tuple[RequestKey, Output]] = []
        progress = False
        index = 0
        for seq, row in flight.rows:
            end = row.start + row.count
            news = seq.land(end, sample=row.sample)
            progress |= news
            if seq.status is Status.RUNNING:
                roster.kv.commit(seq, end)
            if row.sample:
                if seq.status is not Status.FINISHED:
                    outputs.append((seq.key, self._take_token(seq, result, index, now)))
                    progress = True
                index += 1
            if news:
                roster.acquit(seq)
        roster.lift_fence(flight.step)
        self._note_step(progress=progress)
        return outputs

    def _take_token(self, seq: Sequence, result: StepResult, index: int, now: float) -> Output:
        token = result.token_ids[index]
        first = seq.first_token_at is None
        seq.accept(token, now)
        self._roster.counters.generation_tokens += 1
        entry = None if result.logprobs is None else result.logprobs[index]
        logprobs = None if entry is None else [entry]
        reason = seq.rules.verdict(token, len(seq.tokens))
        if reason is not None:
            return self._finish(seq, reason, now, token, logprobs)
        if not first:
            return Output(seq.key[1], [token], logprobs=logprobs)
        times = seq.times(now)
        return Output(seq.key[1], [token], logprobs=logprobs, cached_tokens=seq.cached_tokens, times=times)

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        now: float,
        token: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> Output:
        if seq.status is Status.RUNNING:
            self._planner.note_end()
        self._roster.finish(seq, reason)
        return Output(
            seq.key[1],
            [] if token is None else [token],
            finish=reason,
            stop_token_id=token if reason == "stop" else None,
            logprobs=logprobs,
            cached_tokens=seq.cached_tokens,
            times=seq.times(now),
        )

    def _note_step(self, *, progress: bool) -> None:
        """Progress is a token, or a prompt computed further than ever before."""
        roster = self._roster
        self._idle_steps = 0 if progress or not roster.live else self._idle_steps + 1
        if self._idle_steps > self._patience:
            raise Livelock(self._idle_steps, len(roster.running), len(roster.queue), roster.kv.available)

    # What an observer sees.

    @property
    def in_flight(self) -> int:
        """Plans that are out."""
        return len(self._roster.flights)

    @property
    def epoch(self) -> int:
        """Incarnation of the executor that plans are made for."""
        return self._roster.flights.epoch

    def has_work(self) -> bool:
        """Whether requests are live or plans are out."""
        return bool(self._roster.live) or bool(self._roster.flights)

    def status(self, now: float) -> SchedulerStatus:
        """Gauges now, and counters since the start."""
        roster, short = self._roster, self._planner.lacks_capacity
        counters, oldest, waiting = roster.counters, roster.queue.oldest(), len(roster.queue)
        return SchedulerStatus(
            running=len(roster.running),
            waiting=waiting,
            waiting_by_reason={"capacity": waiting if short else 0, "deferred": 0 if short else waiting},
            oldest_wait_s=0.0 if oldest is None else now - oldest.arrival,
            kv_blocks_total=self._limits.num_kv_blocks,
            kv_blocks_used=self._limits.num_kv_blocks - roster.kv.available,
            finished={str(reason): count for reason, count in counters.finished.items()},
            rejected={str(code): count for code, count in counters.rejected.items()},
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
        )

    def ledger(self) -> Ledger:
        """KV blocks by state; O(pool)."""
        return self._roster.kv.ledger()

    def free_blocks(self) -> list[frozenset[int]]:
        """For each KV group the blocks whose content means nothing: nobody reads them before writing them."""
        return self._roster.kv.free_blocks()

    def check(self) -> list[str]:
        """Every violated invariant, none when all is well; O(pool + tokens held)."""
        return self._roster.violations()
