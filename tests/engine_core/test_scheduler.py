"""The scheduler from outside: submissions, refusals, aborts, overlap, restarts. Streams of tokens: tests/model."""

from __future__ import annotations

import random

import pytest

from engine_core.errors import ResultMismatch, StaleResult
from engine_core.scheduler import Ledger, Limits, RequestKey, Scheduler
from engine_core.wire.client import Output, RequestTimes, Submit, TokenLogprobs
from engine_core.wire.codec import pack_ids, unpack_ids
from engine_core.wire.config import CacheOptions, SchedulerOptions
from engine_core.wire.executor import KvGroup, StepPlan, StepResult
from engine_core.wire.sampling import SamplingParams

EOS = 2
LIMITS = Limits(
    max_model_len=64,
    vocab_size=50,
    kv_groups=(KvGroup(None, 32),),
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    eos_token_ids=(EOS,),
)


def key(name: str, client: bytes = b"c") -> RequestKey:
    return (client, name)


def submit(name: str, prompt: list[int]) -> Submit:
    return Submit(name, pack_ids(prompt), SamplingParams())


class Engine:
    """A scheduler with a clock of whole seconds; plans stay out until `land`."""

    def __init__(self, options: SchedulerOptions | None = None, limits: Limits = LIMITS) -> None:
        self.scheduler = Scheduler(
            options or SchedulerOptions(), CacheOptions(), limits, epoch=1, random=random.Random(0)
        )
        self.plans: list[StepPlan] = []
        self.now = 0.0

    def add(self, name: str, prompt: list[int], params: SamplingParams | None = None, client: bytes = b"c") -> None:
        request = Submit(name, pack_ids(prompt), params or SamplingParams())
        assert self.scheduler.add(key(name, client), request, self.now) is None

    def send(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        assert self.scheduler.check() == []
        if plan is not None:
            self.plans.append(plan)
        return plan

    def land(self, *tokens: int) -> list[Output]:
        """The oldest plan comes back a second later."""
        self.now += 1.0
        plan = self.plans.pop(0)
        outputs = self.scheduler.update(StepResult(plan.epoch, plan.step, list(tokens), None, 0, 1), self.now)
        assert self.scheduler.check() == []
        return [output for _, output in outputs]


def synchronous() -> SchedulerOptions:
    return SchedulerOptions(async_scheduling=False)


def test_a_request_from_start_to_end() -> None:
    engine = Engine(synchronous())
    engine.add("a", [5, 6, 7], SamplingParams(max_tokens=2))
    plan = engine.send()
    assert plan is not None
    assert (plan.epoch, plan.step) == (1, 1)
    assert unpack_ids(plan.fills[0].token_ids).tolist() == [5, 6, 7]
    assert [(row.start, row.count, row.sample) for row in plan.rows] == [(0, 3, True)]
    assert engine.send() is None
    assert engine.land(9) == [Output("a", [9], times=RequestTimes(0.0, 1.0, 0.0, 0))]
    engine.send()
    (last,) = engine.land(8)
    assert (last.token_ids, last.finish, last.stop_token_id) == ([8], "length", None)
    assert last.times is not None
    assert (last.times.queued, last.times.prefill, last.times.decode) == (0.0, 1.0, 1.0)
    assert not engine.scheduler.has_work()
    assert engine.scheduler.ledger().owned == 0


def test_the_next_plan_leaves_before_the_result() -> None:
    engine = Engine()
    engine.add("a", [5, 6, 7])
    engine.send()
    second = engine.send()
    assert second is not None
    assert [(row.start, row.count, row.sample) for row in second.rows] == [(3, 1, True)]
    assert second.fills == []
    assert engine.send() is None
    assert engine.scheduler.in_flight == engine.scheduler.depth == 2


def test_the_last_token_by_length_is_known_ahead() -> None:
    engine = Engine()
    engine.add("a", [5, 6, 7], SamplingParams(max_tokens=1))
    engine.send()
    assert engine.send() is None
    assert engine.land(9)[0].finish == "length"


def test_a_stop_over_runs_by_one_row_of_one_step() -> None:
    engine = Engine()
    engine.add("a", [5, 6, 7])
    engine.send()
    engine.send()
    (last,) = engine.land(EOS)
    assert (last.token_ids, last.finish, last.stop_token_id) == ([EOS], "stop", EOS)
    assert engine.send() is None
    assert engine.scheduler.ledger().owned > 0, "the plan that is out may still touch its blocks"
    assert engine.land(9) == []
    assert engine.scheduler.ledger().owned == 0
    assert engine.scheduler.status(engine.now).generation_tokens == 1


def test_logprobs_go_to_those_who_asked() -> None:
    engine = Engine(synchronous())
    engine.add("a", [5])
    engine.add("b", [6], SamplingParams(logprobs=1))
    plan = engine.send()
    assert plan is not None
    entry = TokenLogprobs(-0.5, [8], [-0.5])
    outputs = dict(engine.scheduler.update(StepResult(1, 1, [9, 8], [None, entry], 0, 1), 1.0))
    assert outputs[key("a")].logprobs is None
    assert outputs[key("b")].logprobs == [entry]


def test_cached_tokens_stand_on_the_first_and_last_output() -> None:
    engine = Engine(synchronous())
    prompt = list(range(5, 14))
    engine.add("a", prompt, SamplingParams(max_tokens=1))
    engine.send()
    engine.land(9)
    engine.add("b", prompt, SamplingParams(max_tokens=3))
    found = []
    for _ in range(3):
        plan = engine.send()
        assert plan is not None
        found.append(engine.land(9)[0].cached_tokens)
    assert found == [8, 0, 8]
    status = engine.scheduler.status(engine.now)
    assert (status.prefix_queries, status.prefix_hits, status.cached_tokens, status.prompt_tokens) == (18, 8, 8, 18)


def test_a_salt_separates() -> None:
    engine = Engine(synchronous())
    found = []
    for number, salt in enumerate(["a", "b", "a", None]):
        request = Submit(f"r{number}", pack_ids(list(range(9))), SamplingParams(max_tokens=1), cache_salt=salt)
        assert engine.scheduler.add(key(f"r{number}"), request, 0.0) is None
        engine.send()
        found.append(engine.land(9)[0].cached_tokens)
    assert found == [0, 0, 8, 0]


def test_output_of_an_earlier_core_counts_and_is_not_sent_again() -> None:
    engine = Engine(synchronous())
    earlier = RequestTimes(1.0, 2.0, 7.0, 1)
    params = SamplingParams(max_tokens=4)
    request = Submit("a", pack_ids([5, 6]), params, output=pack_ids([7, 8]), earlier=earlier)
    assert engine.scheduler.add(key("a"), request, 0.0) is None
    plan = engine.send()
    assert plan is not None
    assert unpack_ids(plan.fills[0].token_ids).tolist() == [5, 6, 7, 8]
    assert plan.fills[0].prompt_len == 2
    assert engine.land(9) == [Output("a", [9], times=RequestTimes(1.0, 2.0, 8.0, 1))]
    engine.send()
    (last,) = engine.land(10)
    assert (last.token_ids, last.finish) == ([10], "length")
    assert last.times == RequestTimes(1.0, 2.0, 9.0, 1)


# Refusals.


def test_what_does_not_fit_is_refused_and_counted() -> None:
    engine = Engine()
    refused = engine.scheduler.add(key("a"), submit("a", [1] * 64), 0.0)
    assert refused is not None
    assert (refused.code, refused.field, refused.limit, refused.given) == ("context_length", "prompt", 63, 64)
    assert engine.scheduler.status(0.0).rejected == {"context_length": 1}
    assert not engine.scheduler.has_work()


def test_an_id_is_live_once_for_each_client() -> None:
    engine = Engine()
    engine.add("a", [5])
    refused = engine.scheduler.add(key("a"), submit("a", [5]), 0.0)
    assert refused is not None
    assert refused.code == "duplicate_id"
    engine.add("a", [5], client=b"other")
    engine.scheduler.abort(key("a"), 0.0)
    engine.add("a", [5])


def test_a_full_queue_sends_away_with_a_time() -> None:
    engine = Engine(SchedulerOptions(max_num_queued_reqs=2))
    engine.add("a", [5])
    engine.add("b", [5])
    refused = engine.scheduler.add(key("x"), submit("x", [5]), 0.0)
    assert refused is not None
    assert (refused.code, refused.field, refused.limit, refused.given) == ("queue_full", "max_num_queued_reqs", 2, 3)
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= 1.0
    engine.send()
    engine.add("x", [5])


def test_a_queue_full_of_tokens_too_but_one_always_may_wait() -> None:
    engine = Engine(SchedulerOptions(max_num_queued_tokens=10))
    engine.add("a", [5] * 20)
    refused = engine.scheduler.add(key("b"), submit("b", [5]), 0.0)
    assert refused is not None
    assert (refused.field, refused.limit, refused.given) == ("max_num_queued_tokens", 10, 21)


# Aborts.


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sent", range(9))
def test_abort_at_every_step_of_a_chunked_prefill(overlap: bool, sent: int) -> None:
    """Before, between and after its chunks, with results out or not: one last output, nothing left."""
    engine = Engine(SchedulerOptions(async_scheduling=overlap))
    engine.add("a", list(range(1, 46)), SamplingParams(max_tokens=4))
    tokens = 0
    for _ in range(sent):
        if engine.send() is None and engine.plans:
            tokens += len(engine.land(*[9] * engine.plans[0].rows[0].sample))
    last = engine.scheduler.abort(key("a"), engine.now)
    assert engine.scheduler.check() == []
    if tokens < 4:
        assert last is not None
        assert (last.token_ids, last.finish) == ([], "abort")
        assert last.times is not None
    assert engine.scheduler.abort(key("a"), engine.now) is None
    while engine.plans:
        assert engine.land(*[9] * engine.plans[0].rows[0].sample) == []
    assert engine.scheduler.ledger().owned == 0
    assert not engine.scheduler.has_work()
    assert sum(engine.scheduler.status(engine.now).finished.values()) == 1


def test_an_id_may_be_used_again_while_the_old_result_is_out() -> None:
    engine = Engine()
    engine.add("a", [5, 6])
    engine.send()
    engine.scheduler.abort(key("a"), engine.now)
    engine.add("a", [7, 8], SamplingParams(max_tokens=1))
    engine.send()
    assert engine.land(9) == []
    assert [output.token_ids for output in engine.land(10)] == [[10]]


def test_a_client_goes_with_all_its_requests() -> None:
    engine = Engine()
    for number in range(6):
        engine.add(str(number), [5, 6], client=b"gone" if number % 2 else b"stays")
    engine.send()
    engine.scheduler.abort_client(b"gone", engine.now)
    assert engine.scheduler.check() == []
    assert engine.scheduler.status(engine.now).finished == {"abort": 3}


# Preemption and restart.


def test_a_token_in_flight_outlives_the_preemption() -> None:
    engine = Engine()
    engine.add("a", [5, 6, 7], SamplingParams(max_tokens=3))
    engine.send()
    engine.send()
    assert engine.scheduler.preempt(key("a"))
    assert not engine.scheduler.preempt(key("a"))
    assert engine.send() is None
    assert engine.land(10) == [Output("a", [10], times=RequestTimes(0.0, 1.0, 0.0, 1))]
    assert engine.send() is None, "it resumes only when nothing of it is out"
    assert engine.land(11) == [Output("a", [11])]
    plan = engine.send()
    assert plan is not None
    assert unpack_ids(plan.fills[0].token_ids).tolist() == [5, 6, 7, 10, 11]
    (last,) = engine.land(12)
    assert (last.token_ids, last.finish) == ([12], "length")
    assert last.times is not None
    assert last.times.preemptions == 1


def test_a_preempted_request_may_end_by_its_late_token() -> None:
    engine = Engine()
    engine.add("a", [5, 6, 7])
    engine.send()
    engine.scheduler.preempt(key("a"))
    (last,) = engine.land(EOS)
    assert last.finish == "stop"
    assert not engine.scheduler.has_work()
    assert engine.scheduler.ledger().owned == 0


def test_nobody_is_preempted_who_does_not_run() -> None:
    engine = Engine()
    engine.add("a", [5])
    assert not engine.scheduler.preempt(key("a"))
    assert not engine.scheduler.preempt(key("unknown"))


def test_a_restart_computes_again_what_was_out() -> None:
    engine = Engine()
    engine.add("a", [5, 6, 7], SamplingParams(seed=11))
    engine.send()
    engine.send()
    assert engine.land(10) == [Output("a", [10], times=RequestTimes(0.0, 1.0, 0.0, 0))]
    engine.scheduler.restart(2)
    assert engine.scheduler.check() == []
    assert engine.scheduler.in_flight == 0
    late = engine.plans.pop()
    with pytest.raises(StaleResult):
        engine.scheduler.update(StepResult(late.epoch, late.step, [11], None, 0, 1), engine.now)
    plan = engine.send()
    assert plan is not None
    assert (plan.epoch, plan.step) == (2, 1)
    assert unpack_ids(plan.fills[0].token_ids).tolist() == [5, 6, 7, 10]
    assert plan.fills[0].seed == 11
    assert [(row.start, row.count) for row in plan.rows] == [(0, 4)], "no block of the old executor is believed"
    assert engine.land(11) == [Output("a", [11])]


def test_a_bad_result_changes_nothing() -> None:
    engine = Engine()
    engine.add("a", [5, 6, 7])
    engine.send()
    with pytest.raises(ResultMismatch):
        engine.scheduler.update(StepResult(1, 1, [], None, 0, 1), 1.0)
    assert engine.scheduler.check() == []
    assert engine.land(9) == [Output("a", [9], times=RequestTimes(0.0, 1.0, 0.0, 0))]


def test_the_ledger_and_the_gauges() -> None:
    engine = Engine()
    assert engine.scheduler.ledger() == Ledger(free=32, cached=0, owned=0, total=32)
    engine.add("a", list(range(9)))
    engine.send()
    engine.land(9)
    status = engine.scheduler.status(engine.now)
    assert (status.running, status.waiting, status.kv_blocks_used, status.kv_blocks_total) == (1, 0, 3, 32)
    assert status.oldest_wait_s == 0.0
    engine.scheduler.abort(key("a"), engine.now)
    status = engine.scheduler.status(engine.now)
    assert (status.running, status.kv_blocks_used) == (0, 0)
    assert engine.scheduler.ledger().cached == 2, "what nobody holds but can be found counts as free"
