"""Requests under suspicion run alone; requests of an earlier core, failed ones, and another number of blocks."""

from __future__ import annotations

import random

import pytest

from engine_core.scheduler import Limits, RequestKey, Scheduler
from engine_core.wire.client import Output, Submit
from engine_core.wire.codec import pack_ids
from engine_core.wire.config import CacheOptions, SchedulerOptions
from engine_core.wire.executor import KvGroup, StepPlan, StepResult
from engine_core.wire.sampling import SamplingParams

TOKEN = 9


def key(name: str) -> RequestKey:
    return (b"c", name)


class Engine:
    """A scheduler and an executor that gives TOKEN for every row; `ran` tells which requests each step held."""

    def __init__(self, *, blocks: int = 64, **options: int | bool) -> None:
        limits = Limits(64, 50, (KvGroup(None, blocks),), 4, 4, 16)
        self.scheduler = Scheduler(
            SchedulerOptions(**options),  # type: ignore[arg-type]
            CacheOptions(),
            limits,
            epoch=1,
            random=random.Random(0),
        )
        self.plans: list[StepPlan] = []
        self.ran: list[set[str]] = []
        self.outputs: list[Output] = []
        self.now = 0.0

    def add(self, *names: str, length: int = 20, count: int = 8) -> None:
        for number, name in enumerate(names):
            prompt = [1 + number + i % 7 for i in range(length)]
            submit = Submit(name, pack_ids(prompt), SamplingParams(max_tokens=count))
            assert self.scheduler.add(key(name), submit, self.now) is None

    def send(self) -> None:
        """As many plans as may be out."""
        while (plan := self.scheduler.schedule(self.now)) is not None:
            assert self.scheduler.check() == []
            self.plans.append(plan)
            if len(self.plans) == 1:
                self.ran.append({name for _, name in self.scheduler.suspects()})

    def land(self) -> None:
        self.now += 1.0
        plan = self.plans.pop(0)
        tokens = [TOKEN for row in plan.rows if row.sample]
        self.outputs += [o for _, o in self.scheduler.update(StepResult(plan.epoch, plan.step, tokens, None, 0, 1), 0)]
        assert self.scheduler.check() == []
        if self.plans:
            self.ran.append({name for _, name in self.scheduler.suspects()})

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.send()
            if self.plans:
                self.land()

    def restart(self, epoch: int, *trial: str) -> None:
        self.plans.clear()
        self.ran.clear()
        self.scheduler.restart(epoch, trial=[key(name) for name in trial])
        assert self.scheduler.check() == []


def made(engine: Engine, name: str) -> int:
    return sum(len(output.token_ids) for output in engine.outputs if output.request_id == name)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_suspect_runs_alone_until_it_comes_further(overlap: bool) -> None:
    engine = Engine(async_scheduling=overlap)
    engine.add("a", "b", "c")
    engine.run(6)
    before = {name: made(engine, name) for name in "abc"}
    engine.restart(2, "b", "c")
    engine.add("new")
    assert engine.scheduler.trial == [key("b"), key("c")]
    steps = 0
    while engine.scheduler.trial:
        engine.run(1)
        steps += 1
        assert steps < 20
    assert all(len(names) <= 1 for names in engine.ran[:-2])
    assert {name for names in engine.ran for name in names} >= {"b", "c"}
    assert made(engine, "b") > before["b"]
    assert made(engine, "c") > before["c"]
    assert made(engine, "a") == before["a"]
    engine.run(40)
    assert {name: made(engine, name) for name in ("a", "b", "c", "new")} == dict.fromkeys(("a", "b", "c", "new"), 8)


def test_the_last_step_of_a_suspect_and_its_abort_end_its_trial() -> None:
    engine = Engine()
    engine.add("a", "b", "c", count=1)
    engine.send()
    engine.restart(2, "a", "b")
    engine.scheduler.abort(key("b"), 0.0)
    engine.run(2)
    assert engine.scheduler.trial == []
    engine.run(20)
    assert {output.request_id for output in engine.outputs} == {"a", "c"}


def test_a_second_restart_keeps_or_drops_the_trial() -> None:
    engine = Engine()
    engine.add("a", "b")
    engine.run(1)
    engine.restart(2, "a", "b", "unknown")
    engine.restart(3, *(name for _, name in engine.scheduler.trial))
    assert engine.scheduler.trial == [key("a"), key("b")]
    engine.restart(4)
    engine.run(40)
    assert made(engine, "a") == made(engine, "b") == 8


def test_suspects_are_those_of_the_oldest_plan_with_what_they_had() -> None:
    engine = Engine()
    assert engine.scheduler.suspects() == {}
    engine.add("a", length=4)
    engine.send()
    assert engine.scheduler.suspects() == {key("a"): 0}
    engine.add("b", length=4)
    engine.land()
    engine.send()
    assert engine.scheduler.suspects() == {key("a"): 4}
    engine.land()
    assert engine.scheduler.suspects() == {key("a"): 5, key("b"): 0}
    engine.scheduler.abort(key("a"), 0.0)
    assert engine.scheduler.suspects() == {key("b"): 0}


def test_a_failed_request_says_why() -> None:
    engine = Engine()
    engine.add("a", "b")
    engine.run(3)
    output = engine.scheduler.fail(key("a"), "it is poison", 9.0)
    assert output is not None
    assert (output.finish, output.error, output.token_ids) == ("error", "it is poison", [])
    assert engine.scheduler.fail(key("a"), "again", 9.0) is None
    engine.run(30)
    assert made(engine, "b") == 8
    assert engine.scheduler.status(0.0).finished == {"error": 1, "length": 1}


def test_what_an_earlier_core_had_taken_is_never_too_much() -> None:
    engine = Engine(max_num_queued_reqs=1)
    engine.add("a")
    submit = Submit("more", pack_ids([1, 2]), SamplingParams(max_tokens=5))
    refusal = engine.scheduler.add(key("more"), submit, 0.0)
    assert refusal is not None
    assert refusal.code == "queue_full"
    resumed = Submit("again", pack_ids([1, 2]), SamplingParams(max_tokens=5), 0, None, pack_ids([3, 4]), True)
    assert engine.scheduler.add(key("again"), resumed, 0.0) is None
    engine.run(30)
    # Two of its five tokens had come before.
    assert made(engine, "again") == 3


def test_another_number_of_blocks() -> None:
    engine = Engine(blocks=64)
    engine.add("small", length=4)
    engine.add("large", length=40, count=20)
    engine.run(5)
    engine.restart(2)
    ((ended_key, ended),) = engine.scheduler.resize((KvGroup(None, 8),), 9.0)
    assert (ended_key, ended.finish) == (key("large"), "error")
    assert "room for 32 tokens" in (ended.error or "")
    engine.run(20)
    assert made(engine, "small") == 8
    assert engine.scheduler.ledger().total == 8
    refusal = engine.scheduler.add(key("x"), Submit("x", pack_ids([1] * 40), SamplingParams()), 0.0)
    assert refusal is not None
    assert refusal.code == "never_fits"
