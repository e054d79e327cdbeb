"""The way back to a core: fake cores come and go at one socket."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine_core.wire.client import Fatal, Welcome
from engine_core.wire.codec import unpack_ids
from engine_core.wire.sampling import SamplingParams
from frontend.async_client import AsyncClient
from frontend.errors import EngineDead
from frontend.generation import Generation
from frontend.link import Owner
from tests.fakes.core import FakeCore, fake_model

FORTY = SamplingParams(max_tokens=40, temperature=0.0)
LETTERS = [*b"abcdefghijklmnopqrstuvwxyz"] * 3


async def until(what: str, holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a state."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


class Cores:
    """One fake core after the other at the same socket."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "core.sock"
        self.all: list[FakeCore] = []

    @property
    def now(self) -> FakeCore:
        """The present one."""
        return self.all[-1]

    async def start(self, *, ready: bool = True, digest: str = "") -> FakeCore:
        """The next one."""
        self.all.append(FakeCore(self.path, fake_model(), step_s=0.003, digest=digest))
        await self.now.start(ready=ready)
        return self.now


@asynccontextmanager
async def cores(folder: Path) -> AsyncIterator[Cores]:
    """The first core runs."""
    made = Cores(folder)
    await made.start()
    try:
        yield made
    finally:
        await made.now.stop()


async def read(generation: Generation) -> list[int]:
    """All tokens."""
    return [token async for output in generation for token in output.token_ids]


def test_streams_go_on_with_the_next_core(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cores(tmp_path) as line, await AsyncClient.connect(line.path) as client:
            await client.wait_ready(5)
            first = [client.submit([*b"z"], FORTY) for _ in range(3)]
            readers = [asyncio.ensure_future(read(each)) for each in first]
            await until("tokens are made", lambda: line.now.generated > 15)
            await line.now.stop()
            await until("it is noticed", lambda: client.lost is not None)
            assert client.state == "recovering"
            # Taken, though there is no core.
            readers.append(asyncio.ensure_future(read(client.submit([*b"z"], FORTY))))
            with pytest.raises(EngineDead):
                await client.inspect(1)
            await line.start(ready=False)
            assert client.state == "recovering"
            line.now.become_ready()
            for reader in readers:
                assert await reader == LETTERS[:40]
            assert (client.state, client.lost, client.open_generations) == ("ready", None, 0)
            again = {submit.request_id: submit for submit in line.now.submits}
            assert all(len(unpack_ids(again[each.request_id].output)) > 0 for each in first)
            assert client.recoveries.requests == 4

    asyncio.run(scenario())


def test_core_after_core(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cores(tmp_path) as line, await AsyncClient.connect(line.path) as client:
            readers = [asyncio.ensure_future(read(client.submit([*b"z"], FORTY))) for _ in range(3)]
            for number in range(4):
                await until("tokens are made", lambda: line.now.generated > 6)
                await line.now.stop()
                await line.start(ready=number % 2 == 0)
                if number % 2:
                    line.now.become_ready()
            for reader in readers:
                assert await reader == LETTERS[:40]

    asyncio.run(scenario())


@pytest.mark.parametrize("final", [True, False])
def test_last_words(tmp_path: Path, final: bool) -> None:
    async def scenario() -> None:
        async with cores(tmp_path) as line, await AsyncClient.connect(line.path) as client:
            await client.wait_ready(5)
            reader = asyncio.ensure_future(read(client.submit([*b"z"], FORTY)))
            await until("tokens are made", lambda: line.now.generated > 3)
            line.now.gate.clear()
            line.now.tell_all(Fatal("internal", "no more", final))
            if final:
                with pytest.raises(EngineDead, match="no more"):
                    await reader
                assert client.state == "dead"
                return
            # The same core is found again: it had forgotten this client, nothing else.
            await until("hello again", lambda: len(line.now.submits) > 1)
            line.now.live = {key: live for key, live in line.now.live.items() if live.count == 0 or live.submit.output}
            line.now.gate.set()
            assert await reader == LETTERS[:40]

    asyncio.run(scenario())


def test_no_other_core_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cores(tmp_path) as line, await AsyncClient.connect(line.path, return_s=0.5) as client:
            await client.wait_ready(5)
            reader = asyncio.ensure_future(read(client.submit([*b"z"], FORTY)))
            await until("tokens are made", lambda: line.now.generated > 3)
            await line.now.stop()
            with pytest.raises(EngineDead, match=r"no other core came within 0\.5 s"):
                await asyncio.wait_for(reader, 5)

    asyncio.run(scenario())


def test_another_engine_at_the_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cores(tmp_path) as line, await AsyncClient.connect(line.path) as client:
            await client.wait_ready(5)
            await line.now.stop()
            await line.start(digest="of another configuration")
            await until("it is refused", lambda: client.fatal is not None)
            assert client.fatal == Fatal("protocol", "another engine answers on the socket")

    asyncio.run(scenario())


def test_the_owner_has_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:  # noqa: ASYNC220
            async with cores(tmp_path) as line:
                core = line.now
                core._hello = lambda client: core._send(  # type: ignore[method-assign]
                    client, Welcome(1, "", "ready", "m", owner.pid, 60.0)
                )
                client = await AsyncClient.connect(line.path, return_s=60.0)
                await core.stop()
                await until("it is lost", lambda: client.lost is not None)
                owner.kill()
                await until("all is over", lambda: client.fatal is not None, 3.0)
                assert client.fatal is not None
                assert client.fatal.message.endswith("the server has ended")
                await client.close()

    asyncio.run(scenario())


def test_a_silent_core_is_stalled_first_and_lost_in_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cores(tmp_path) as line, await AsyncClient.connect(line.path, silence_s=5.0) as client:
            await client.wait_ready(5)
            answer = line.now._send
            line.now._send = lambda *_: None  # type: ignore[method-assign]
            await until("stalled", lambda: client.state == "stalled")
            assert "said nothing for" in client.reason
            line.now._send = answer  # type: ignore[method-assign]
            await until("ready again", lambda: client.state == "ready")
            line.now._send = lambda *_: None  # type: ignore[method-assign]
            await until("lost", lambda: client.lost is not None)
            assert client.lost is not None
            assert client.lost.code == "stalled"

    asyncio.run(scenario())


def test_owners_that_are_not_watched() -> None:
    owner = Owner()
    for pid in (0, os.getpid(), 2**22 + 1):
        owner.know(pid)
        assert not owner.gone()
    owner.close()


def test_an_unseeded_request_gets_one_seed_for_good(tmp_path: Path) -> None:
    async def scenario() -> None:
        seeds = iter((7, 8))
        async with (
            cores(tmp_path) as line,
            await AsyncClient.connect(line.path, draw_seed=lambda: next(seeds)) as client,
        ):
            await client.wait_ready(5)
            line.now.gate.clear()
            params = SamplingParams(max_tokens=3)
            seeded = SamplingParams(seed=3, max_tokens=3)
            # Kept: a generation that nobody holds is aborted.
            kept = [client.submit([*b"a"], given) for given in (params, params, FORTY, seeded)]
            await until("all are there", lambda: len(line.now.submits) == 4)
            first = [submit.params.seed for submit in line.now.submits]
            assert first == [7, 8, None, 3]
            await line.now.stop()
            await line.start()
            await until("all are there again", lambda: len(line.now.submits) == 4)
            assert [submit.params.seed for submit in line.now.submits] == first
            assert len(kept) == client.open_generations

    asyncio.run(scenario())
