"""Results of launched steps: in order, with or without a thread."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from engine_core.wire.executor import StepPlan, StepResult
from model_executor.collector import ThreadCollector, collector_of

DEADLINE_S = 10.0


class Gate:
    """Collects a step once it is let through; a step below 0 fails."""

    def __init__(self) -> None:
        self._may = threading.Semaphore(0)

    def open(self) -> None:
        self._may.release()

    def __call__(self, step: int) -> StepResult:
        assert self._may.acquire(timeout=DEADLINE_S)
        if step < 0:
            raise RuntimeError("lost")
        return StepResult(1, step, [], None, 0, 0)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def steps(gate: Gate) -> Iterator[ThreadCollector[int]]:
    collector = ThreadCollector(gate)
    yield collector
    collector.close()


def take(collector: ThreadCollector[int]) -> list[int]:
    """Steps of the next results."""
    readable, _, _ = select.select([collector.fileno()], [], [], DEADLINE_S)
    assert readable
    return [result.step for result in collector.take()]


def take_all(collector: ThreadCollector[int], into: list[int]) -> None:
    """Append the steps of all results that will come."""
    while collector.out:
        select.select([collector.fileno()], [], [], DEADLINE_S)
        for result in collector.take():
            into.append(result.step)  # noqa: PERF401 - what comes before a failure counts


def test_nothing_is_there_before_the_device_is_done(steps: ThreadCollector[int], gate: Gate) -> None:
    steps.put(1)
    steps.put(2)
    assert list(steps.take()) == []
    assert steps.out == 2
    gate.open()
    assert take(steps) == [1]
    assert steps.out == 1
    assert list(steps.take()) == []
    gate.open()
    assert take(steps) == [2]
    assert steps.out == 0


def test_many_steps_come_in_order(steps: ThreadCollector[int], gate: Gate) -> None:
    taken: list[int] = []
    for step in range(200):
        gate.open()
        steps.put(step)
        while steps.out == 2:
            taken += take(steps)
    while steps.out:
        taken += take(steps)
    assert taken == list(range(200))


def test_what_a_step_raises_is_raised_to_the_one_who_takes(steps: ThreadCollector[int], gate: Gate) -> None:
    steps.put(-1)
    gate.open()
    with pytest.raises(RuntimeError, match="lost"):
        take(steps)


def test_results_before_a_failure_are_taken_first(steps: ThreadCollector[int], gate: Gate) -> None:
    steps.put(1)
    steps.put(-1)
    gate.open()
    gate.open()
    taken: list[int] = []
    with pytest.raises(RuntimeError, match="lost"):
        take_all(steps, taken)
    assert taken == [1]


def test_it_ends_while_a_step_is_out(gate: Gate) -> None:
    collector = ThreadCollector(gate)
    collector.put(1)
    gate.open()
    collector.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("collector")]


class Runner:
    """A runner of some depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def launch(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.epoch, plan.step, [], None, 0, 0)

    def collect(self, launched: StepResult) -> StepResult:
        return launched


def test_without_overlap_the_result_is_there_at_once() -> None:
    collector = collector_of(Runner(1))
    assert collector.fileno() is None
    result = StepResult(1, 1, [], None, 0, 0)
    collector.put(result)
    assert collector.out == 1
    assert list(collector.take()) == [result]
    assert (collector.out, list(collector.take())) == (0, [])
    collector.close()


def test_with_overlap_a_thread_waits() -> None:
    collector = collector_of(Runner(2))
    assert isinstance(collector, ThreadCollector)
    collector.close()
