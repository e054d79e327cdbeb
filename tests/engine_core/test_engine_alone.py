"""An engine core for one test: configurations, phases and failures that the shared one cannot have."""

from __future__ import annotations

import asyncio
import signal
import time
import weakref
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio

from engine_core import engine as engine_module
from engine_core.clients import Clients
from engine_core.ending import exit_status
from engine_core.engine import Engine
from engine_core.executor_client import ExecutorClient
from engine_core.scheduler import Scheduler
from engine_core.wire.client import (
    Abort,
    Drain,
    Fatal,
    Inspect,
    Inspection,
    Output,
    Progress,
    Ready,
    Rejected,
)
from engine_core.wire.config import (
    CacheOptions,
    EngineConfig,
    SchedulerOptions,
    TextFacts,
    write_config,
)
from engine_core.wire.executor import StepResult
from engine_core.wire.sampling import SamplingParams
from engine_core.wire.transport import CORE_SOCKET, EXECUTOR_SOCKET, bind_router
from tests.fakes.core_process import FAKE_EXECUTOR, ROOT, WireClient, fake_model, running_core
from tests.fakes.executor import continuation
from tests.fakes.waiting import until

CONFIG = EngineConfig(model=fake_model("delay_s=0.002"), scheduler=SchedulerOptions(max_num_seqs=8))


def test_eos_ends_a_request(tmp_path: Path) -> None:
    tokens = continuation([1, 2, 3], 8)
    config = msgspec.structs.replace(CONFIG, text=TextFacts(eos_token_ids=(tokens[4], 511)))
    with running_core(tmp_path, config) as core:
        client = core.client()
        client.connect()
        client.submit("a", [1, 2, 3])
        assert client.finish("a") == tokens[:5]
        assert (client.outputs["a"][-1].finish, client.outputs["a"][-1].stop_token_id) == ("stop", tokens[4])
        client.submit("b", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        assert client.finish("b") == tokens


@pytest.mark.parametrize("overlap", [True, False])
def test_a_small_pool_changes_nothing(tmp_path: Path, overlap: bool) -> None:
    """Preempted requests are computed again, and say the same."""
    config = EngineConfig(
        model=fake_model(),
        cache=CacheOptions(block_size=4, num_kv_blocks=24),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=16, async_scheduling=overlap),
    )
    with running_core(tmp_path, config) as core:
        client = core.client()
        client.connect()
        prompts = {f"r{i}": [i] * (i + 3) for i in range(12)}
        for request_id, prompt in prompts.items():
            client.submit(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=40))
        for request_id, prompt in prompts.items():
            assert client.finish(request_id, 20.0) == continuation(prompt, 40)
        assert client.status().preemptions > 0
        client.send(Inspect(3))
        assert client.expect(Inspection).violations == []


def test_before_ready_requests_are_refused(tmp_path: Path) -> None:
    with running_core(tmp_path, EngineConfig(model=fake_model("load_s=1"))) as core:
        client = core.client()
        assert client.hello().state == "loading"
        client.submit("early", [1])
        client.send(Abort(["early"]))
        rejected = client.expect(Rejected)
        assert (rejected.request_id, rejected.code) == ("early", "not_ready")
        first = client.status()
        assert first.state == "loading"
        assert first.rejected == {"not_ready": 1}
        client.send(Inspect(5))
        assert client.expect(Inspection).seq == 5
        client.expect(Ready)
        client.submit("now", [1])
        assert client.finish("now") == continuation([1], 8)


def test_progress_reaches_all_and_those_who_come_late(tmp_path: Path) -> None:
    with running_core(tmp_path, EngineConfig(model=fake_model("load_s=1"))) as core:
        early, late = core.client(), core.client()
        early.hello()
        assert early.expect(Progress) == Progress("load", 0, 100, "bytes")
        assert early.status().reason == "loading: load 0 of 100 bytes"
        late.hello()
        assert late.receive() == Progress("load", 0, 100, "bytes")
        for client in (early, late):
            assert client.expect(Progress) == Progress("load", 100, 100, "bytes")
            client.expect(Ready)


def test_draining_refuses_new_requests_and_finishes_the_old(tmp_path: Path) -> None:
    with running_core(tmp_path, CONFIG) as core:
        client = core.client()
        client.connect()
        client.submit("old", [1], SamplingParams(temperature=0.0, max_tokens=50))
        client.send(Drain())
        client.submit("new", [1])
        assert client.expect(Rejected).code == "draining"
        status = client.status()
        assert (status.state, status.running) == ("draining", 1)
        assert client.finish("old") == continuation([1], 50)
        assert core.client().hello().state == "draining"


def test_the_step_age_grows_while_nothing_moves(tmp_path: Path) -> None:
    with running_core(tmp_path, EngineConfig(model=fake_model("hang_at=3"))) as core:
        client = core.client()
        client.connect()
        assert client.status().step_age_s == 0.0
        client.submit("a", [1])
        while len(client.tokens("a")) < 2:
            client.receive()
        until("the age grows", lambda: client.status().step_age_s > 0.5)
        assert client.status().steps == 2


def test_a_core_that_was_stopped_blames_nobody(tmp_path: Path) -> None:
    """Its clients were not silent: it did not listen."""
    with running_core(tmp_path, CONFIG) as core:
        client = core.client()
        client.connect()
        client.start("a")
        core.child.signal(signal.SIGSTOP)
        time.sleep(2.0)
        core.child.signal(signal.SIGCONT)
        client.submit("b", [5])
        assert client.finish("b") == continuation([5], 8)
        assert client.status().running == 1


# In this process, with a scheduler that fails.


class Unsound(Scheduler):
    """Its books are never right."""

    def check(self) -> list[str]:
        return ["one block too many", "one slot too few"]


class Crashing(Scheduler):
    """It fails at the first result."""

    def update(self, result: StepResult, now: float) -> list[tuple[tuple[bytes, str], Output]]:
        raise ZeroDivisionError(f"{result.step} at {now}")


async def run_with(folder: Path, make_scheduler: type[Scheduler]) -> tuple[Fatal, list[object]]:
    """Run one request on an engine in this process; its ending, and what the client got."""
    context = zmq.asyncio.Context()
    write_config(CONFIG, folder / "engine.json")
    executor = ExecutorClient(
        bind_router(context, folder / EXECUTOR_SOCKET),
        config=CONFIG,
        config_path=folder / "engine.json",
        socket_path=folder / EXECUTOR_SOCKET,
        module=FAKE_EXECUTOR,
    )
    clients = Clients(bind_router(context, folder / CORE_SOCKET))
    client = WireClient(folder / CORE_SOCKET)

    def talk() -> list[object]:
        client.connect()
        client.submit("a", [1, 2, 3])
        got: list[object] = []
        while not got or not isinstance(got[-1], Fatal):
            got.append(client.receive())
        return got

    try:
        ending, got = await asyncio.gather(
            Engine(CONFIG, clients, executor, make_scheduler=make_scheduler).run(), asyncio.to_thread(talk)
        )
        return ending, got
    finally:
        client.close()
        context.destroy(linger=500)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children find the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("importable")
def test_an_unsound_engine_ends_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "SELF_CHECK_S", 0.0)
    ending, got = asyncio.run(run_with(tmp_path, Unsound))
    assert ending == Fatal("internal", "engine: 2 invariants violated, first: one block too many", final=False)
    assert got[-1] == ending
    assert exit_status(ending) == 4
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "invariant violated: one block too many" in told
    assert "invariant violated: one slot too few" in told


@pytest.mark.usefixtures("importable")
def test_an_error_in_a_task_ends_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ending, got = asyncio.run(run_with(tmp_path, Crashing))
    assert ending == Fatal("internal", "engine: task executor failed: ZeroDivisionError", final=False)
    assert got[-1] == ending
    assert any(record.levelname == "CRITICAL" for record in caplog.records)


@pytest.mark.usefixtures("importable")
def test_no_executor_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(ExecutorClient, "start", refuse)

    async def run() -> Fatal:
        context = zmq.asyncio.Context()
        write_config(CONFIG, tmp_path / "engine.json")
        clients = Clients(bind_router(context, tmp_path / CORE_SOCKET))
        executor = ExecutorClient(
            bind_router(context, tmp_path / EXECUTOR_SOCKET),
            config=CONFIG,
            config_path=tmp_path / "engine.json",
            socket_path=tmp_path / EXECUTOR_SOCKET,
            module=FAKE_EXECUTOR,
        )
        ending = await Engine(CONFIG, clients, executor).run()
        context.destroy(linger=0)
        return ending

    assert asyncio.run(run()) == Fatal(
        "internal", "engine: no executor could be started: no more processes", final=False
    )


class Frames(list[list[bytes]]):
    """A batch that can be watched."""


class OneBatch(Clients):
    """Clients of whom one batch comes, and nothing more."""

    batch: weakref.ref[Frames] | None = None

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        super().__init__(socket)
        self.waiting = asyncio.Event()

    async def receive(self) -> list[list[bytes]]:
        """The batch, once."""
        if self.batch is None:
            frames = Frames([[b"stranger", b"no message"]])
            self.batch = weakref.ref(frames)
            return frames
        self.waiting.set()
        await asyncio.Event().wait()
        return []


def test_what_was_received_is_not_kept_while_nothing_comes(tmp_path: Path) -> None:
    async def serve() -> None:
        context = zmq.asyncio.Context()
        clients = OneBatch(bind_router(context, tmp_path / CORE_SOCKET))
        executor = ExecutorClient(
            bind_router(context, tmp_path / EXECUTOR_SOCKET),
            config=CONFIG,
            config_path=tmp_path / "engine.json",
            socket_path=tmp_path / EXECUTOR_SOCKET,
            module=FAKE_EXECUTOR,
        )
        serving = asyncio.create_task(Engine(CONFIG, clients, executor)._serve_clients())
        await asyncio.wait_for(clients.waiting.wait(), 10)
        assert clients.malformed == 1
        assert clients.batch is not None
        assert clients.batch() is None
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        context.destroy(linger=0)

    asyncio.run(serve())
