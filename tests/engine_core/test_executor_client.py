"""The executor as the core sees it: only the process that was started counts, and it is lost once, with a reason."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import zmq.asyncio

from engine_core.executor_client import UNREACHABLE_S, ExecutorClient, SentPlan
from engine_core.wire import codec
from engine_core.wire.client import PROTOCOL, Fatal, Progress
from engine_core.wire.config import Deadlines, EngineConfig, config_hash, write_config
from engine_core.wire.executor import (
    ExecutorFatal,
    ExecutorHello,
    ExecutorReady,
    ExecutorToCore,
    Row,
    SlotFill,
    StepPlan,
    StepResult,
)
from engine_core.wire.sampling import SamplingParams
from engine_core.wire.transport import EXECUTOR_SOCKET, bind_router, connect_dealer
from tests.fakes.core_process import FAKE_EXECUTOR, ROOT, fake_model
from tests.fakes.executor import continuation
from tests.fakes.waiting import gone

DEADLINE_S = 10.0


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a state while the loop runs."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, "not in time"
        await asyncio.sleep(0.005)


class Side:
    """The core's side of an executor, started at time 0, and why it was lost."""

    def __init__(self, folder: Path, script: str, context: zmq.asyncio.Context) -> None:
        self.config = EngineConfig(model=fake_model(script), deadlines=Deadlines(start_timeout=60.0, step_timeout=30.0))
        self.socket = folder / EXECUTOR_SOCKET
        write_config(self.config, folder / "engine.json")
        self.lost: list[Fatal] = []
        self.executor = ExecutorClient(
            bind_router(context, self.socket),
            config=self.config,
            config_path=folder / "engine.json",
            socket_path=self.socket,
            module=FAKE_EXECUTOR,
        )
        self.start(1)

    def start(self, epoch: int) -> None:
        self.executor.start(epoch, 0.0, self.lost.append)

    async def receive(self) -> ExecutorToCore:
        return await asyncio.wait_for(self.executor.receive(), DEADLINE_S)

    async def ready(self) -> ExecutorReady:
        while not isinstance(message := await self.receive(), ExecutorReady):
            assert isinstance(message, Progress)
        return message

    async def until_lost(self) -> Fatal:
        """Why it is lost; until then messages are taken and forgotten."""
        listening = asyncio.create_task(self._listen())
        await until(lambda: bool(self.lost))
        listening.cancel()
        return self.lost[0]

    async def _listen(self) -> None:
        while True:
            await self.executor.receive()


@asynccontextmanager
async def side(folder: Path, script: str = "") -> AsyncIterator[Side]:
    context = zmq.asyncio.Context()
    made = Side(folder, script, context)
    try:
        yield made
    finally:
        made.executor.end(0.0)
        context.destroy(linger=0)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def plan(step: int, *, epoch: int = 1) -> StepPlan:
    """A prompt of three tokens at step 1, one token a step from then on; the cache has one block of 16."""
    fills = [SlotFill(0, codec.pack_ids([1, 2, 3]), 3, SamplingParams(), 1, [[0]])] if step == 1 else []
    row = Row(0, 0, 3, [], sample=True) if step == 1 else Row(0, step + 1, 1, [], sample=True)
    return StepPlan(epoch, step, fills, [row])


def test_start_plans_and_results(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path) as core:
            executor = core.executor
            before = executor.ready
            assert (await core.ready()).num_kv_blocks == 256
            assert (before, executor.ready) == (False, True)
            tokens: list[int] = []
            for step in (1, 2, 3):
                executor.send(plan(step), 0.0)
            assert [sent.queued for sent in executor.sent] == [False, True, True]
            for step, size in ((1, 3), (2, 1), (3, 1)):
                result = await core.receive()
                assert isinstance(result, StepResult)
                tokens += result.token_ids
                assert executor.landed(result) == SentPlan(step, size, 1, queued=step > 1)
            assert tokens == continuation([1, 2, 3], 3)
            assert core.lost == []

    asyncio.run(scenario())


def test_results_of_no_plan_that_is_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path) as core:
            await core.ready()
            executor = core.executor
            assert executor.landed(StepResult(1, 1, [], None, 0, 0)) is None
            executor.send(plan(1), 0.0)
            assert executor.landed(StepResult(0, 1, [5], None, 0, 0)) is None
            assert executor.landed(StepResult(2, 1, [5], None, 0, 0)) is None
            assert executor.landed(StepResult(1, 0, [5], None, 0, 0)) is None
            assert core.lost == []
            assert executor.landed(StepResult(1, 2, [5], None, 0, 0)) is None
            (lost,) = core.lost
            assert lost.message.endswith("result of step 2 came before that of step 1")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("protocol=2", Fatal("protocol", f"executor: protocol: expected {PROTOCOL}, the peer has 2")),
        ("wrong_hash=1", None),
        ("refuse=hidden_size: 7", Fatal("start_refused", "hidden_size: 7")),
    ],
)
def test_a_start_that_is_refused(tmp_path: Path, script: str, told: Fatal | None) -> None:
    async def scenario() -> None:
        async with side(tmp_path, script) as core:
            digest = config_hash(core.config)
            expected = told or Fatal("protocol", f"executor: config_hash: expected {digest}, the peer has {'0' * 16}")
            assert await core.until_lost() == expected
            assert not core.executor.ready

    asyncio.run(scenario())


def test_it_is_lost_once(tmp_path: Path) -> None:
    """What it says before its end is the reason; its end is the consequence."""

    async def scenario() -> None:
        async with side(tmp_path, "fatal_at=1") as core:
            await core.ready()
            core.executor.send(plan(1), 0.0)
            pid = core.executor.pid
            assert await core.until_lost() == Fatal("executor_died", f"executor (pid {pid}): the device is on fire")
            await asyncio.sleep(0.5)
            core.executor.stalled(99.0)
            core.executor.check(1e9)
            assert len(core.lost) == 1

    asyncio.run(scenario())


def test_results_sent_before_its_end_still_count(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path, "exit_at=2") as core:
            await core.ready()
            core.executor.send(plan(1), 0.0)
            core.executor.send(plan(2), 0.0)
            await until(lambda: not core.executor.ready)
            assert core.lost == []
            result = await core.receive()
            assert isinstance(result, StepResult)
            assert result.step == 1
            assert (await core.until_lost()).message.endswith("ended: exit status 9")

    asyncio.run(scenario())


def test_strangers_at_the_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path, "delay_s=0.01") as core:
            await core.ready()
            context = zmq.asyncio.Context()
            stranger = connect_dealer(context, core.socket)
            encode = codec.executor_to_core().encode
            digest = config_hash(core.config)
            for message in (
                ExecutorHello(PROTOCOL, digest, 1, os.getpid()),
                StepResult(1, 1, [5], None, 0, 0),
                ExecutorFatal("internal", "not mine"),
            ):
                await stranger.send(encode(message))
            await stranger.send(b"\xc1")
            await stranger.send_multipart([b"", encode(ExecutorFatal("internal", "not mine"))])
            listening = asyncio.create_task(core.receive())
            await until(lambda: core.executor.malformed == 5)
            core.executor.send(plan(1), 0.0)
            result = await listening
            assert isinstance(result, StepResult)
            assert result.token_ids == continuation([1, 2, 3], 1)
            assert core.lost == []
            context.destroy(linger=0)

    asyncio.run(scenario())


def test_a_hello_in_the_name_of_a_living_executor(tmp_path: Path) -> None:
    """Someone else at the socket cannot take its place, nor end it."""

    async def scenario() -> None:
        async with side(tmp_path) as core:
            await core.ready()
            context = zmq.asyncio.Context()
            stranger = connect_dealer(context, core.socket)
            hello = ExecutorHello(PROTOCOL + 1, config_hash(core.config), 1, core.executor.pid)
            await stranger.send(codec.executor_to_core().encode(hello))
            listening = asyncio.create_task(core.receive())
            await until(lambda: core.executor.malformed == 1)
            core.executor.send(plan(1), 0.0)
            assert isinstance(await listening, StepResult)
            assert core.lost == []
            context.destroy(linger=0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("number", "outside"), [(signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGSEGV, False)]
)
def test_whose_doing_a_death_was(tmp_path: Path, number: signal.Signals, outside: bool) -> None:
    async def scenario() -> None:
        async with side(tmp_path) as core:
            await core.ready()
            os.kill(core.executor.pid, number)
            await core.until_lost()
            assert core.executor.outside is outside

    asyncio.run(scenario())


def test_a_stopped_executor_is_stalled_soon_and_lost_in_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path) as core:
            await core.ready()
            executor = core.executor
            executor.check(1000.0)
            assert executor.stall(1000.0, 0.0) == ""
            os.kill(executor.pid, signal.SIGSTOP)
            await until(lambda: psutil.Process(executor.pid).status() == psutil.STATUS_STOPPED)
            executor.check(1001.5)
            assert "stopped by a signal for 1.5 s" in executor.stall(1001.5, 0.0)
            executor.forgive(1.0)
            assert executor.stall(1001.5, 0.0) == ""
            executor.check(1031.0)
            assert core.lost == []
            executor.check(1031.5)
            assert core.lost[0].code == "stalled"
            assert executor.outside

    asyncio.run(scenario())


def test_an_executor_that_sleeps_over_a_plan_is_stalled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path, "hang_at=1") as core:
            await core.ready()
            executor = core.executor
            executor.check(1000.0)
            assert executor.stall(1100.0, 100.0) == ""
            executor.send(plan(1), 1000.0)

            def asleep() -> bool:
                executor.check(1000.0)
                executor.check(1006.0)
                return executor.stall(1006.0, 6.0) != ""

            await until(asleep)
            # The step itself is young: it may only just begin.
            assert executor.stall(1006.0, 1.0) == ""

    asyncio.run(scenario())


def test_deadline_of_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path, "never_ready=1") as core:
            core.executor.check(60.0)
            assert core.lost == []
            core.executor.check(60.1)
            assert core.lost == [Fatal("stalled", "executor: not ready within start_timeout 60 s")]

    asyncio.run(scenario())


def test_deadline_of_the_start_is_over_when_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path) as core:
            await core.ready()
            core.executor.check(1e9)
            assert core.lost == []

    asyncio.run(scenario())


def test_the_next_incarnation(tmp_path: Path) -> None:
    """One place replaces an executor: end, then start with the next epoch."""

    async def scenario() -> None:
        async with side(tmp_path) as core:
            await core.ready()
            first = core.executor.pid
            core.executor.send(plan(1), 0.0)
            os.kill(first, signal.SIGKILL)
            assert (await core.until_lost()).code == "executor_died"
            core.executor.end()
            core.start(2)
            assert core.executor.pid not in (0, first)
            assert (await core.ready()).epoch == 2
            assert core.executor.landed(StepResult(1, 1, [5], None, 0, 0)) is None
            core.executor.send(plan(1, epoch=2), 0.0)
            result = await core.receive()
            assert isinstance(result, StepResult)
            assert core.executor.landed(result) == SentPlan(1, 3, 1, queued=False)
            assert len(core.lost) == 1

    asyncio.run(scenario())


def test_end_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path) as core:
            await core.ready()
            pid = core.executor.pid
            core.executor.end()
            assert gone(pid)
            assert core.executor.pid == 0
            core.executor.end()
            assert core.lost == []

    asyncio.run(scenario())


def test_an_executor_that_closed_its_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with side(tmp_path, "deafen_at=1") as core:
            await core.ready()
            pid = core.executor.pid
            core.executor.send(plan(1), 0.0)
            deadline = asyncio.get_running_loop().time() + DEADLINE_S
            step = 2
            while not core.lost and asyncio.get_running_loop().time() < deadline:
                core.executor.send(plan(step), 1.0)
                core.executor.check(1.0 + UNREACHABLE_S)
                core.executor.check(1.1 + UNREACHABLE_S)
                step += 1
                await asyncio.sleep(0.005)
            assert core.lost == [Fatal("executor_died", f"executor (pid {pid}) closed its socket")]

    asyncio.run(scenario())
