"""Who waits how long: order, progress, bounded waiting, and what the modes promise."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine_core.errors import Livelock
from engine_core.policy import AGEING_S, AGEING_SHARE, BYPASS_S, BYPASS_WINDOW, MAX_BYPASS
from engine_core.scheduler import PATIENCE_STEPS, Scheduler
from engine_core.sequence import MAX_PREEMPTIONS
from engine_core.wire.executor import KvGroup
from tests.model.executor import Model
from tests.model.harness import Harness, Mode, make_scheduler, verify
from tests.model.reference import one_by_one
from tests.model.trace import Request, Tick, Trace, plain_request, random_trace

BOTH = pytest.mark.parametrize("overlap", [False, True])


def device(*, blocks: int = 64, block_size: int = 4, rows: int = 4, budget: int = 32, length: int = 256) -> Model:
    """A modelled device."""
    return Model(
        vocab=24,
        eos=(0,),
        groups=(KvGroup(None, blocks),),
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=length,
    )


def begin(model: Model, mode: Mode, requests: list[Request]) -> Harness:
    """All requests arrive at once."""
    harness = Harness(model, mode)
    for request in requests:
        harness.submit(request)
    return harness


def finish(harness: Harness, requests: list[Request]) -> None:
    """Run to the end; all answers are right."""
    harness.drain()
    verify(Trace(harness.model, [Tick(0.0, requests)]), harness)


def idle(scheduler: Scheduler, times: int) -> None:
    """Ask for plans and get none."""
    for _ in range(times):
        assert scheduler.schedule(0.0) is None


def first_starts(harness: Harness) -> list[str]:
    """Request ids in the order in which a step first held them."""
    return list(dict.fromkeys(key[1] for key in harness.starts))


@BOTH
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_equals_start_in_order_of_arrival(overlap: bool, batching: str) -> None:
    model = device()
    requests = [plain_request(number, 10, 6, model) for number in range(30)]
    harness = begin(model, Mode(overlap=overlap, batching="static" if batching == "static" else "continuous"), requests)
    finish(harness, requests)
    assert first_starts(harness) == [request.key[1] for request in requests]


@BOTH
def test_priority_orders_the_queue(overlap: bool) -> None:
    model = device(rows=1)
    requests = [plain_request(number, 5, 3, model, priority=number % 3) for number in range(9)]
    harness = begin(model, Mode(overlap=overlap, policy="priority"), requests)
    finish(harness, requests)
    assert first_starts(harness) == [f"r{number}" for number in (0, 3, 6, 1, 4, 7, 2, 5, 8)]


@BOTH
def test_an_urgent_request_displaces_a_less_urgent_row(overlap: bool) -> None:
    model = device(rows=4, blocks=200)
    slow = [plain_request(number, 8, 100, model, priority=10) for number in range(4)]
    harness = begin(model, Mode(overlap=overlap, policy="priority"), slow)
    for _ in range(10):
        harness.turn()
    urgent = plain_request(99, 8, 3, model, priority=0)
    harness.submit(urgent)
    sent = harness.steps
    finish(harness, [*slow, urgent])
    assert harness.done[urgent.key] - sent <= 8
    assert harness.scheduler.status(harness.now).preemptions == 1


@BOTH
def test_an_urgent_request_displaces_nobody_for_nothing(overlap: bool) -> None:
    """Even without the less urgent row there would be too few blocks: it keeps running."""
    model = device(blocks=16, rows=4)
    first = plain_request(1, 30, 10, model, priority=-5)
    second = plain_request(2, 4, 10, model, priority=5)
    harness = begin(model, Mode(overlap=overlap, policy="priority"), [first, second])
    harness.turn()
    urgent = plain_request(3, 44, 3, model, priority=-1)
    harness.submit(urgent)
    for _ in range(4):
        harness.turn()
        assert harness.scheduler.status(harness.now).preemptions == 0
    finish(harness, [first, second, urgent])


@BOTH
def test_a_low_priority_request_starts_within_its_share_of_starts(overlap: bool) -> None:
    model = device(rows=1)
    patient = plain_request(0, 4, 2, model, priority=1000)
    requests = [patient]
    harness = begin(model, Mode(overlap=overlap, policy="priority"), requests)
    # One urgent request waits at any time, so that order alone would never let the patient one start.
    harness.submit(plain_request(1, 4, 2, model))
    requests.append(plain_request(1, 4, 2, model))
    overdue_at: int | None = None
    while patient.key not in harness.starts and len(requests) < 200:
        if harness.scheduler.status(harness.now).waiting < 2:
            requests.append(plain_request(len(requests), 4, 2, model))
            harness.submit(requests[-1])
        harness.now += 0.5
        harness.turn()
        if overdue_at is None and harness.now - 100.0 >= AGEING_S:
            overdue_at = len(harness.starts)
    assert overdue_at is not None
    assert len(harness.starts) - overdue_at <= AGEING_SHARE + 1
    finish(harness, requests)


@BOTH
def test_small_ones_pass_a_blocked_head_so_often_and_no_more(overlap: bool) -> None:
    model = device(blocks=32, block_size=4, rows=4, budget=64, length=128)
    holder = plain_request(0, 60, 60, model)
    big = plain_request(1, 100, 4, model)
    small = [plain_request(number, 4, 2, model) for number in range(2, 60)]
    requests = [holder, big, *small]
    harness = begin(model, Mode(overlap=overlap, prefix_caching=False), requests)
    finish(harness, requests)
    order = first_starts(harness)
    assert order.index("r1") == MAX_BYPASS + 1
    assert order[2] == "r3", "the small ones keep their order"


@BOTH
def test_a_blocked_head_is_passed_only_so_long(overlap: bool) -> None:
    model = device(blocks=32, block_size=4, rows=4, budget=64, length=128)
    holder = plain_request(0, 60, 60, model)
    big = plain_request(1, 100, 4, model)
    harness = begin(model, Mode(overlap=overlap, prefix_caching=False), [holder, big])
    harness.turn()
    harness.now += BYPASS_S
    small = plain_request(2, 4, 2, model)
    harness.submit(small)
    finish(harness, [holder, big, small])
    assert first_starts(harness) == ["r0", "r1", "r2"]


@BOTH
def test_each_waiting_request_is_considered_in_turn(overlap: bool) -> None:
    """A hundred that lack blocks stand before one that does not: it is found within one round."""
    model = device(blocks=32, block_size=4, rows=4, budget=64, length=128)
    holder = plain_request(0, 60, 60, model)
    big = [plain_request(number, 100, 1, model) for number in range(1, 101)]
    small = plain_request(101, 4, 1, model)
    harness = begin(model, Mode(overlap=overlap, prefix_caching=False), [holder, *big, small])
    before = harness.steps
    while small.key not in harness.starts:
        harness.turn()
        assert harness.steps - before <= -(-len(big) // BYPASS_WINDOW) + 2
    finish(harness, [holder, *big, small])


@BOTH
def test_static_batches_do_not_mix(overlap: bool) -> None:
    model = device(rows=3, budget=8)
    requests = [plain_request(number, 3 + number % 7, 2 + number % 5, model) for number in range(14)]
    mode = Mode(overlap=overlap, batching="static")
    harness = begin(model, mode, requests)
    finish(harness, requests)
    batches = [harness.starts[index : index + 3] for index in range(0, len(requests), 3)]
    for earlier, later in pairwise(batches):
        assert max(harness.done[key] for key in earlier) < min(harness.done[key] for key in later)
    assert harness.scheduler.status(harness.now).preemptions == 0


@BOTH
def test_static_takes_nobody_while_a_batch_runs(overlap: bool) -> None:
    model = device(rows=4)
    early, late = plain_request(0, 8, 20, model), plain_request(1, 8, 2, model)
    harness = begin(model, Mode(overlap=overlap, batching="static"), [early])
    harness.turn()
    harness.submit(late)
    finish(harness, [early, late])
    assert harness.done[early.key] < harness.done[late.key]


@BOTH
def test_a_long_prompt_stops_nobody(overlap: bool) -> None:
    """Running streams get a token in each step; short ones are answered before the long prefill ends."""
    model = device(blocks=600, block_size=16, rows=16, budget=256, length=8192)
    streams = [plain_request(number, 8, 60, model) for number in range(4)]
    harness = begin(model, Mode(overlap=overlap), streams)
    for _ in range(6):
        harness.turn()
    long = plain_request(10, 8000, 2, model)
    harness.submit(long)
    harness.turn()
    short = [plain_request(number, 50, 2, model) for number in range(11, 15)]
    for request in short:
        harness.submit(request)
    while not harness.received[long.key].tokens:
        harness.turn()
        if any(harness.received[request.key].end is None for request in streams):
            assert harness.tokens_per_step[-1] >= 4
    assert all(harness.received[request.key].end is not None for request in short)
    finish(harness, [*streams, long, *short])


@BOTH
def test_many_long_prompts_leave_room_for_a_start(overlap: bool) -> None:
    """Prompts that fill every step keep nobody waiting who could start: he starts in the next step."""
    model = device(blocks=2000, block_size=16, rows=16, budget=64, length=4096)
    long = [plain_request(number, 2000, 1, model) for number in range(6)]
    harness = begin(model, Mode(overlap=overlap), long)
    for _ in range(10):
        harness.turn()
    short = plain_request(10, 4, 1, model)
    harness.submit(short)
    harness.turn()
    harness.turn()
    assert short.key in harness.starts
    finish(harness, [*long, short])


@BOTH
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_five_pools_full_of_requests_all_get_through(overlap: bool, prefix_caching: bool) -> None:
    """Each fits alone, together they need five times the pool: steady progress, few preemptions, little waste."""
    model = device(blocks=30, block_size=4, rows=30, budget=64, length=100)
    requests = [plain_request(number, 5, 15, model) for number in range(30)]
    harness = begin(model, Mode(overlap=overlap, prefix_caching=prefix_caching), requests)
    finish(harness, requests)
    status = harness.scheduler.status(harness.now)
    assert 0 < status.preemptions <= MAX_PREEMPTIONS * len(requests)
    assert harness.steps < 3 * one_by_one(requests, model)[-1]
    window = 10
    sums = [
        sum(harness.tokens_per_step[index : index + window]) for index in range(len(harness.tokens_per_step) - window)
    ]
    assert min(sums) > 0


@BOTH
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_no_slower_than_three_times_one_by_one(overlap: bool, policy: str, batching: str) -> None:
    mode = Mode(
        overlap=overlap,
        prefix_caching=False,
        policy="priority" if policy == "priority" else "fcfs",
        batching="static" if batching == "static" else "continuous",
    )
    for seed in range(25):
        trace = random_trace(seed)
        harness = begin(trace.model, mode, trace.requests)
        harness.drain()
        assert harness.steps < 3 * one_by_one(trace.requests, trace.model)[-1]


@BOTH
def test_a_preemption_sets_blocks_free_or_is_not_done(overlap: bool) -> None:
    """Two rows outgrow the pool at once: one yields, and only one, though its blocks come back a step later."""
    model = device(blocks=13, block_size=4, rows=3, budget=64, length=48)
    requests = [plain_request(0, 8, 10, model), plain_request(1, 8, 10, model), plain_request(2, 21, 8, model)]
    harness = begin(model, Mode(overlap=overlap, prefix_caching=False), requests)
    finish(harness, requests)
    assert harness.scheduler.status(harness.now).preemptions == 1


def test_a_wedged_scheduler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(device(), Mode())
    request = plain_request(0, 4, 4, device())
    assert scheduler.add(request.key, request.submit, 0.0) is None
    monkeypatch.setattr("engine_core.kv_manager.KVManager.admit", lambda *_: ((1,), 0))
    idle(scheduler, PATIENCE_STEPS)
    with pytest.raises(Livelock, match="0 running, 1 waiting"):
        idle(scheduler, 10 * PATIENCE_STEPS)


def test_idling_is_no_livelock() -> None:
    scheduler = make_scheduler(device(), Mode())
    idle(scheduler, 10 * PATIENCE_STEPS)


def test_gauges_explain_who_waits() -> None:
    model = device(rows=1, budget=8)
    harness = begin(model, Mode(overlap=False), [plain_request(number, 20, 3, model) for number in range(3)])
    harness.turn()
    harness.now += 7.0
    status = harness.scheduler.status(harness.now)
    assert (status.running, status.waiting, status.waiting_by_reason) == (1, 2, {"capacity": 2, "deferred": 0})
    assert status.oldest_wait_s == pytest.approx(7.0)
    assert status.kv_blocks_used == 5
    wide = device(rows=4, budget=8)
    harness = begin(wide, Mode(overlap=False), [plain_request(number, 20, 3, wide) for number in range(3)])
    harness.turn()
    status = harness.scheduler.status(harness.now)
    assert status.waiting_by_reason == {"capacity": 0, "deferred": status.waiting}
    assert status.waiting > 0
    harness.drain()


def test_random_seeds_are_drawn_once() -> None:
    """A request without a seed keeps the one it got through preemptions and restarts."""
    model = device()
    request = plain_request(0, 5, 8, model)
    scheduler = make_scheduler(model, Mode(overlap=False), seed=5)
    submit = request.submit
    unseeded = type(submit)("r", submit.prompt, type(submit.params)(max_tokens=8))
    assert scheduler.add((b"c", "r"), unseeded, 0.0) is None
    first = scheduler.schedule(0.0)
    assert first is not None
    assert first.fills[0].seed == random.Random(5).getrandbits(63)
    scheduler.restart(2)
    again = scheduler.schedule(0.0)
    assert again is not None
    assert again.fills[0].seed == first.fills[0].seed
