"""A server in this process over a real engine core with the fake executor."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from engine_core.wire.client import Inspection, Status
from engine_core.wire.config import CacheOptions, EngineConfig, SchedulerOptions
from tests.fakes.core_process import RunningCore, fake_model, running_core
from tests.fakes.live import LiveServer, eventually
from tests.hostile.raw import Dial, connect

STEP_S = 0.02
MAX_SEQS = 4
STEP_TOKENS = 32
BLOCKS = 256


@dataclass
class Stack:
    """HTTP server and engine core.

    Attributes:
        live: the server.
        core: the core's process.
    """

    live: LiveServer
    core: RunningCore

    def inspect(self) -> Inspection:
        """The core's ledger, checked now."""
        return self.live.run(self.live.client.inspect(5.0))

    def status(self) -> Status:
        """The core's latest report."""
        status = self.live.client.status
        assert status is not None
        return status

    def is_empty(self) -> bool:
        """Whether no request is left anywhere and every block is free or cached."""
        found = self.inspect()
        assert not found.violations
        return (
            found.owned == 0
            and self.live.client.open_generations == 0
            and len(self.live.service.running) == 0
            and self.live.metric("tercet_num_requests_running") == 0
            and self.live.metric("tercet_num_requests_waiting") == 0
            and self.live.metric("tercet_kv_cache_usage_perc") == 0
        )

    def settle(self, seconds: float = 5.0) -> None:
        """Wait until nothing is left.

        Raises:
            AssertionError: it did not come to that.
        """
        eventually(self.is_empty, "no request and no block is left", seconds)


def config(**script: float) -> EngineConfig:
    """Small steps, and the fake executor's script."""
    told = ",".join(f"{name}={value}" for name, value in script.items())
    return EngineConfig(
        model=fake_model(told),
        cache=CacheOptions(num_kv_blocks=BLOCKS),
        scheduler=SchedulerOptions(max_num_seqs=MAX_SEQS, max_num_batched_tokens=STEP_TOKENS),
    )


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Makes connections, and closes them at the end."""
    made: list[socket.socket] = []

    def connect_and_keep(url: str, receive_buffer: int | None = None) -> socket.socket:
        made.append(connect(url, receive_buffer=receive_buffer))
        return made[-1]

    yield connect_and_keep
    for connection in made:
        connection.close()


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that takes STEP_S a step."""
    folder = tmp_path_factory.mktemp("stack")
    with running_core(folder, config(delay_s=STEP_S)) as core, LiveServer(folder, core_socket=core.socket) as live:
        yield Stack(live, core)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that goes as fast as it can."""
    folder = tmp_path_factory.mktemp("stack")
    with running_core(folder, config()) as core, LiveServer(folder, core_socket=core.socket) as live:
        yield Stack(live, core)
