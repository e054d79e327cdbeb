from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from msgspec import structs

from engine_core.wire.client import PROTOCOL, Progress
from engine_core.wire.codec import pack_ids
from engine_core.wire.config import (
    CacheOptions,
    EngineConfig,
    ExecutorOptions,
    ModelOptions,
    SchedulerOptions,
    config_hash,
    write_config,
)
from engine_core.wire.errors import MalformedFrame
from engine_core.wire.executor import (
    ExecutorFatal,
    ExecutorHello,
    ExecutorReady,
    KvGroup,
    Row,
    Shutdown,
    SlotFill,
    StepPlan,
    StepResult,
)
from engine_core.wire.sampling import SamplingParams
from model_executor.errors import PlanInvalid
from model_executor.worker import Link, serve, work
from tests.fixtures.bad import BAD, Bad
from tests.fixtures.llama import write_rand
from tests.fixtures.reference import Reference, prompts
from tests.model_executor.driver import GREEDY, Driver, Job
from tests.model_executor.executor_process import DEADLINE_S, CoreEnd, executor_process, gone

BLOCKS, BLOCK_SIZE = 300, 4


def make_config(folder: Path, **model: object) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(model=str(folder), max_model_len=100, **model),  # type: ignore[arg-type]  # as given
        cache=CacheOptions(block_size=BLOCK_SIZE, num_kv_blocks=BLOCKS),
        scheduler=SchedulerOptions(max_num_seqs=12, max_num_batched_tokens=256),
        executor=ExecutorOptions(device="cpu", cpu_threads=1),
    )


class Echo:
    """A runner whose token is the step's number, and whose launches do the work."""

    depth = 1

    def launch(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.epoch, plan.step, [plan.step], None, 0, 0)

    def collect(self, launched: StepResult) -> StepResult:
        return launched


class Ahead(Echo):
    """A runner whose device finishes a step only once the next one has been launched, or a step is the last one.

    Args:
        last: its step.
        fails: the step whose collection fails.
    """

    depth = 2

    def __init__(self, last: int, fails: int = 0) -> None:
        self._launched = [threading.Event() for _ in range(last + 2)]
        self._launched[last + 1].set()
        self._fails = fails
        self.order: list[tuple[str, int]] = []

    def launch(self, plan: StepPlan) -> StepResult:
        self.order.append(("launch", plan.step))
        self._launched[plan.step].set()
        return super().launch(plan)

    def collect(self, launched: StepResult) -> StepResult:
        assert self._launched[launched.step + 1].wait(DEADLINE_S), "the next step was not launched meanwhile"
        self.order.append(("collect", launched.step))
        if launched.step == self._fails:
            raise RuntimeError("the device is gone")
        return launched


@pytest.fixture
def core(tmp_path: Path) -> Iterator[CoreEnd]:
    with CoreEnd(tmp_path / "core.sock") as end:
        yield end


@pytest.fixture
def link(core: CoreEnd) -> Iterator[Link]:
    """An executor's end that has said hello."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = Link(context, core.path)
    end.send(ExecutorHello(PROTOCOL, "", 3, 1))
    core.receive()
    yield end
    end.close()
    context.term()


def plan(step: int, epoch: int = 3) -> StepPlan:
    return StepPlan(epoch, step, [], [])


def test_plans_are_answered_in_order_and_those_of_another_epoch_dropped(core: CoreEnd, link: Link) -> None:
    for message in (plan(1), plan(7, epoch=2), plan(2), plan(1, epoch=4), plan(3), Shutdown()):
        core.send(message)
    serve(link, Echo(), 3)
    results = [core.receive() for _ in range(3)]
    assert [(result.epoch, result.token_ids) for result in results if isinstance(result, StepResult)] == [
        (3, [1]),
        (3, [2]),
        (3, [3]),
    ]


def test_the_next_step_is_launched_before_the_one_before_is_done(core: CoreEnd, link: Link) -> None:
    runner = Ahead(last=20)
    for step in range(1, 21):
        core.send(plan(step))
    core.send(Shutdown())
    serve(link, runner, 3)
    results = [core.until(StepResult)[1] for _ in range(20)]
    assert [result.token_ids for result in results] == [[step] for step in range(1, 21)]
    order = runner.order
    for step in range(1, 20):
        assert order.index(("launch", step + 1)) < order.index(("collect", step))
        # No more than two are out: what a plan relies on may not be overtaken.
        assert step < 3 or order.index(("launch", step)) > order.index(("collect", step - 2))


def test_a_result_leaves_without_another_plan(core: CoreEnd, link: Link) -> None:
    """The core may wait for it before it plans again."""
    ends: list[Exception] = []

    def run() -> None:
        try:
            serve(link, Ahead(last=1), 3)
        except PlanInvalid as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    core.send(plan(1))
    assert core.until(StepResult)[1].step == 1
    core.send(plan(7))
    thread.join(DEADLINE_S)
    assert len(ends) == 1


def test_what_fails_after_the_launch_is_an_error(core: CoreEnd, link: Link) -> None:
    core.send(plan(1))
    core.send(plan(2))
    with pytest.raises(RuntimeError, match="the device is gone"):
        serve(link, Ahead(last=2, fails=2), 3)
    assert core.until(StepResult)[1].step == 1


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_step_out_of_turn_is_an_error(core: CoreEnd, link: Link, step: int) -> None:
    core.send(plan(1))
    core.send(plan(step))
    with pytest.raises(PlanInvalid, match=f"step: {step}: allowed is 2"):
        serve(link, Echo(), 3)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\xa4plan\x01", b"x" * 100_000])
def test_garbage_is_an_error(core: CoreEnd, link: Link, frame: bytes) -> None:
    core.send_bytes(frame)
    with pytest.raises(MalformedFrame):
        serve(link, Echo(), 3)


@pytest.mark.parametrize("bad", [bad for bad in BAD if "tokenizer" not in bad.name], ids=lambda bad: bad.name)
def test_a_broken_folder_is_refused_by_name(core: CoreEnd, tmp_path: Path, bad: Bad) -> None:
    folder = write_rand(tmp_path / "model")
    bad.apply(folder)
    assert work(make_config(folder), core.path, 1, time.monotonic()) == 3
    _, fatal = core.until(ExecutorFatal)
    assert fatal.code == "refused"
    assert "\n" not in fatal.message
    for name in bad.names:
        assert name in fatal.message


def test_a_pool_too_small_is_refused_with_what_would_fit(core: CoreEnd, rand_folder: Path) -> None:
    config = structs.replace(make_config(rand_folder), cache=CacheOptions(block_size=16, num_kv_blocks=6))
    assert work(config, core.path, 1, time.monotonic()) == 3
    _, fatal = core.until(ExecutorFatal)
    assert fatal.code == "refused"
    assert "--max-model-len 96" in fatal.message


def test_a_fault_inside_is_told_in_one_line(core: CoreEnd, rand_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("model_executor.runner.Runner.warm_up", fail)
    assert work(make_config(rand_folder), core.path, 1, time.monotonic()) == 4
    _, fatal = core.until(ExecutorFatal)
    assert fatal == ExecutorFatal("internal", "RuntimeError: first line second line")


def test_nothing_imports_torch_before_the_configuration_is_read() -> None:
    code = "import sys, model_executor.__main__, model_executor.worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == "False\n"


@pytest.fixture(scope="module")
def running(rand_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CoreEnd, ExecutorReady]]:
    """A real executor of epoch 5 with RAND, and what it said when it was ready."""
    config = make_config(rand_folder)
    with executor_process(tmp_path_factory.mktemp("executor"), config, epoch=5) as (core, child):
        before, ready = core.until(ExecutorReady)
        phases = [message.phase for message in before if isinstance(message, Progress)]
        assert list(dict.fromkeys(phases)) == ["start", "plan", "load", "pack", "kv_cache", "warm_up"]
        ended = {message.phase for message in before if isinstance(message, Progress) and message.done == message.total}
        assert ended == set(phases)
        yield core, ready
        core.send(Shutdown())
        assert child.wait(DEADLINE_S) == 0


def test_a_process_serves_what_the_reference_says(running: tuple[CoreEnd, ExecutorReady], rand_folder: Path) -> None:
    """Over the wire, two plans ahead, prompts in chunks, prefill and decode mixed; then each request alone."""
    core, ready = running
    assert (ready.epoch, ready.num_kv_blocks, ready.max_model_len) == (5, BLOCKS, 100)
    reference = Reference(rand_folder)
    made = (reference.greedy(prompt, 8) for prompt in prompts(20, vocab=512, seed=6, longest=40))
    continuations = [item for item in made if item.clear()][:6]
    assert len(continuations) == 6
    soft = SamplingParams(temperature=0.9, top_k=50, logprobs=2)

    def jobs() -> list[Job]:
        greedy = [Job(list(item.prompt), 8, arrives=1 + index) for index, item in enumerate(continuations)]
        return greedy + [Job(list(item.prompt), 8, soft, seed=index) for index, item in enumerate(continuations)]

    def receive() -> StepResult:
        return core.until(StepResult)[1]

    driver = Driver(
        core.send, receive, groups=[KvGroup(None, BLOCKS)], block_size=BLOCK_SIZE, chunk=7, depth=2, epoch=5
    )
    together = jobs()
    driver.run(together)
    assert [job.output for job in together[:6]] == [list(item.token_ids) for item in continuations]
    for job, other in zip(together, jobs(), strict=True):
        driver.reset_pool()
        other.arrives = 1
        driver.run([other])
        assert other.output == job.output
        assert [entry.top_ids for entry in other.logprobs] == [entry.top_ids for entry in job.logprobs]


def test_a_plan_that_contradicts_the_state_ends_the_process(rand_folder: Path, tmp_path: Path) -> None:
    config = make_config(rand_folder, load_format="dummy")
    with executor_process(tmp_path, config) as (core, child):
        core.until(ExecutorReady)
        core.send(StepPlan(1, 1, [SlotFill(0, pack_ids([1]), 1, GREEDY, 0, [[BLOCKS]])], [Row(0, 0, 1, [], True)]))
        _, fatal = core.until(ExecutorFatal)
        assert (fatal.code, fatal.message) == ("internal", "PlanInvalid: plan: blocks: 300: allowed is 0 .. 299")
        assert child.wait(DEADLINE_S) == 4


def test_sigterm_ends_it_cleanly_when_idle(rand_folder: Path, tmp_path: Path) -> None:
    with executor_process(tmp_path, make_config(rand_folder)) as (core, child):
        core.until(ExecutorReady)
        child.signal(signal.SIGINT)
        child.signal(signal.SIGTERM)
        assert child.wait(5.0) == 0


def test_sigterm_ends_it_cleanly_while_it_starts(rand_folder: Path, tmp_path: Path) -> None:
    with executor_process(tmp_path, make_config(rand_folder)) as (core, child):
        assert isinstance(core.receive(), Progress)
        child.signal(signal.SIGTERM)
        assert child.wait(5.0) == 0


def test_bad_usage_is_status_2(tmp_path: Path) -> None:
    config = tmp_path / "engine.json"
    config.write_text('{"model": {"mood": 1}}')
    child_end, lifeline = os.pipe()
    socket = str(tmp_path / "core.sock")
    arguments = ["--config", str(config), "--socket", socket, "--epoch", "1", "--parent-fd", str(child_end)]
    for given, message in ((arguments, "mood"), (arguments[2:], "--config")):
        done = subprocess.run(
            [sys.executable, "-m", "model_executor", *given],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            pass_fds=[child_end],
            check=False,
        )
        assert done.returncode == 2
        assert message in done.stderr
    os.close(child_end)
    os.close(lifeline)


PARENT = """
import sys, time
from engine_core.wire.child import Child
child = Child.spawn("executor", sys.argv[1:])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stage", ["starting", "ready"])
def test_it_dies_with_its_parent(rand_folder: Path, tmp_path: Path, stage: str) -> None:
    config = tmp_path / "engine.json"
    write_config(make_config(rand_folder), config)
    with CoreEnd(tmp_path / "core.sock") as core:
        arguments = ["-m", "model_executor", "--config", str(config), "--socket", str(core.path), "--epoch", "1"]
        with subprocess.Popen([sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True) as parent:
            try:
                assert parent.stdout is not None
                pid = int(parent.stdout.readline())
                _, hello = core.until(ExecutorHello)
                assert hello.config_hash == config_hash(make_config(rand_folder))
                if stage == "ready":
                    core.until(ExecutorReady)
            finally:
                parent.kill()
        assert gone(pid, 5.0)
