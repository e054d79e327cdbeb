"""What the engine says of itself, in each of its states."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import zmq.asyncio

from engine_core.admission import Limits
from engine_core.clients import Clients
from engine_core.condition import Condition
from engine_core.executor_client import ExecutorClient
from engine_core.scheduler import Scheduler
from engine_core.wire.client import Inspection, Model, Progress, Ready, Submit
from engine_core.wire.codec import pack_ids
from engine_core.wire.config import CacheOptions, EngineConfig, SchedulerOptions
from engine_core.wire.executor import KvGroup
from engine_core.wire.sampling import SamplingParams
from engine_core.wire.transport import CORE_SOCKET, EXECUTOR_SOCKET, bind_router
from tests.wire.messages import LOAD

READY = Ready(Model("m", 64, 512, (), "float32", "float32", 8, 4), LOAD, [], {}, 1)


def scheduler() -> Scheduler:
    limits = Limits(
        max_model_len=64,
        vocab_size=512,
        kv_groups=(KvGroup(None, 8),),
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        eos_token_ids=(),
    )
    return Scheduler(SchedulerOptions(), CacheOptions(), limits, epoch=1, random=random.Random(0))


def submit(made: Scheduler, request_id: str, ids: list[int], now: float) -> None:
    made.add((b"c", request_id), Submit(request_id, pack_ids(ids), SamplingParams(max_tokens=4)), now)


def with_condition(folder: Path, look: Callable[[Condition, Clients], None]) -> None:
    """Look at a condition made at time 100, with sockets but no executor."""

    async def run() -> None:
        context = zmq.asyncio.Context()
        clients = Clients(bind_router(context, folder / CORE_SOCKET))
        executor = ExecutorClient(
            bind_router(context, folder / EXECUTOR_SOCKET),
            config=EngineConfig(),
            config_path=folder / "engine.json",
            socket_path=folder / EXECUTOR_SOCKET,
            module="none",
        )
        try:
            look(Condition(clients, executor, 100.0), clients)
        finally:
            context.destroy(linger=0)

    asyncio.run(run())


def test_from_loading_to_draining(tmp_path: Path) -> None:
    def look(condition: Condition, _: Clients) -> None:
        told = [(condition.state, condition.reason)]
        condition.progress = Progress("load", 3, 10, "bytes")
        told.append((condition.state, condition.reason))
        condition.ready, condition.scheduler = READY, scheduler()
        told.append((condition.state, condition.reason))
        condition.draining = True
        told.append((condition.state, condition.reason))
        assert told == [
            ("loading", "the executor is starting"),
            ("loading", "loading: load 3 of 10 bytes"),
            ("ready", ""),
            ("draining", "draining"),
        ]

    with_condition(tmp_path, look)


def test_states_of_trouble(tmp_path: Path) -> None:
    def look(condition: Condition, _: Clients) -> None:
        condition.lost("signal 9")
        told = [(condition.state, condition.recovering)]
        condition.ready, condition.scheduler = READY, scheduler()
        condition.stall = "it is stopped"
        told.append((condition.state, condition.reason))
        condition.lost("signal 9")
        told.append((condition.state, condition.reason))
        submit(condition.scheduler, "a", [1], 100.0)
        # Nothing can go on, and nobody is to blame for that.
        assert condition.step_age(500.0) == 0.0
        condition.draining = True
        told.append((condition.state, condition.reason))
        condition.draining = False
        condition.recovered(3, 1.5)
        condition.recovered(4, 0.5)
        told.append((condition.state, condition.reason))
        assert told == [
            ("loading", ""),
            ("stalled", "it is stopped"),
            ("recovering", "signal 9; another executor starts: the executor is starting"),
            ("draining", "draining"),
            ("ready", ""),
        ]
        status = condition.status(1, 101.0)
        assert (status.executor_restarts, status.recovered) == (2, 7)
        assert (status.recovery_s, status.recovery_total_s) == (0.5, 2.0)

    with_condition(tmp_path, look)


def test_the_step_age_counts_only_while_there_is_work(tmp_path: Path) -> None:
    def look(condition: Condition, _: Clients) -> None:
        ages = [condition.step_age(105.0)]
        condition.scheduler = made = scheduler()
        ages.append(condition.step_age(105.0))
        submit(made, "a", [1], 105.0)
        condition.progress_at = 105.0
        ages.append(condition.step_age(107.5))
        made.abort((b"c", "a"), 108.0)
        ages.append(condition.step_age(109.0))
        assert ages == [0.0, 0.0, 2.5, 0.0]

    with_condition(tmp_path, look)


def test_refusals_of_all_who_refuse_are_added(tmp_path: Path) -> None:
    def look(condition: Condition, clients: Clients) -> None:
        assert condition.status(1, 100.0).rejected == {}
        condition.refused("not_ready")
        condition.refused("not_ready")
        clients.invalid = 3
        assert condition.status(1, 100.0).rejected == {"not_ready": 2, "invalid": 3}
        condition.scheduler = made = scheduler()
        submit(made, "a", [512], 100.0)
        submit(made, "b", [1] * 64, 100.0)
        assert condition.status(1, 100.0).rejected == {"not_ready": 2, "invalid": 4, "context_length": 1}

    with_condition(tmp_path, look)


def test_the_status_before_and_after_ready(tmp_path: Path) -> None:
    def look(condition: Condition, clients: Clients) -> None:
        clients.malformed = 2
        status = condition.status(5, 101.0)
        assert (status.seq, status.state, status.malformed_frames) == (5, "loading", 2)
        assert (status.kv_blocks_total, status.executor_pid, status.epoch) == (0, 0, 0)
        condition.ready, condition.scheduler = READY, scheduler()
        condition.stats.record(0.5, 7)
        condition.stale = 1
        submit(condition.scheduler, "a", [1], 101.0)
        status = condition.status(6, 102.0)
        assert (status.state, status.kv_blocks_total, status.waiting, status.oldest_wait_s) == ("ready", 8, 1, 1.0)
        assert (status.steps, status.step_tokens, status.step_time_s, status.stale_results) == (1, 7, 0.5, 1)
        assert status.finished == {}

    with_condition(tmp_path, look)


def test_the_books(tmp_path: Path) -> None:
    def look(condition: Condition, _: Clients) -> None:
        assert condition.inspect(3) == Inspection(3, 0, 0, 0, 0, [])
        condition.scheduler = scheduler()
        assert condition.inspect(4) == Inspection(4, 8, 0, 0, 8, [])
        submit(condition.scheduler, "a", [1, 2, 3, 4, 5], 100.0)
        condition.scheduler.schedule(100.0)
        held = condition.inspect(5)
        assert held.owned == 8 - held.free == 2
        assert held.violations == []

    with_condition(tmp_path, look)
