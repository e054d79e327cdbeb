"""Requests given up at random moments, by the thousand: nothing is left, every block is free, and memory stays flat."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_core.wire.sampling import SamplingParams
from frontend.client import AsyncClient
from frontend.errors import FrontendError
from frontend.tokenizer.load import load_tokenizer
from tests.fakes.core_process import running_core
from tests.fakes.executor import continuation
from tests.fakes.live import LiveServer
from tests.hostile.conftest import BLOCKS, MAX_SEQS, Stack, config
from tests.hostile.process import Served
from tests.hostile.raw import connect, leave, request

BLOCK = 16
# One wave of these holds every block there is.
WAVE_PROMPT = BLOCKS * BLOCK // MAX_SEQS - BLOCK


async def cancelled_at(client: AsyncClient, number: int, draw: random.Random) -> None:
    """One request, cancelled after a random number of turns of the loop."""
    length = draw.choice([1, 3, 40, 200])
    params = SamplingParams(temperature=0.0, max_tokens=draw.randrange(1, 60), ignore_eos=True)
    prompt = [(number * 7 + place) % 500 for place in range(length)]

    async def use() -> None:
        async with await client.generate(prompt, params, cache_salt=draw.choice([None, f"salt {number}"])) as answer:
            async for _ in answer:
                pass

    task = asyncio.create_task(use())
    for _ in range(draw.randrange(0, 25)):
        await asyncio.sleep(0)
    if draw.random() < 0.3:
        await asyncio.sleep(draw.random() * 0.02)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def wave(client: AsyncClient) -> None:
    """Sequences that need every block at once, all exact."""

    async def one(first: int) -> None:
        prompt = [(first + place) % 500 for place in range(WAVE_PROMPT)]
        params = SamplingParams(temperature=0.0, max_tokens=BLOCK, ignore_eos=True)
        got: list[int] = []
        async for output in client.submit(prompt, params, cache_salt=f"wave {first}"):
            got += output.token_ids
        assert got == continuation(prompt, BLOCK)

    await asyncio.wait_for(asyncio.gather(*(one(number * 50) for number in range(MAX_SEQS))), 60)


async def is_empty(client: AsyncClient) -> bool:
    found = await client.inspect(5.0)
    assert found.violations == []
    return found.owned == 0 and client.open_generations == 0


async def settle(client: AsyncClient) -> None:
    for _ in range(500):
        if await is_empty(client):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests are left")


@pytest.mark.parametrize("count", [800, pytest.param(10_000, marks=pytest.mark.slow)])
def test_cancelled_at_any_moment(tmp_path: Path, chain_folder: Path, count: int) -> None:
    async def main(socket: Path) -> None:
        draw = random.Random(count)
        async with await AsyncClient.connect(socket, tokenizer=load_tokenizer(chain_folder)) as client:
            await client.wait_ready(20)
            for start in range(0, count, 32):
                await asyncio.gather(*(cancelled_at(client, start + each, draw) for each in range(32)))
            await settle(client)
            await wave(client)
            await settle(client)

    with running_core(tmp_path, config()) as core:
        asyncio.run(main(core.socket))


class Scripted:
    """Runs a coroutine by hand, and throws into it at the await with a given number."""

    def __init__(self, work: Any, at: int) -> None:
        self._work = work
        self._at = at
        self.reached = False

    def __await__(self) -> Generator[Any, None, None]:
        inner = self._work.__await__()
        waited = 0
        while True:
            try:
                future = inner.send(None)
            except StopIteration:
                return
            if waited == self._at:
                self.reached = True
                inner.throw(asyncio.CancelledError())
                raise AssertionError("a cancelled coroutine went on")
            waited += 1
            yield future


def test_cancelled_at_every_await_of_the_client(tmp_path: Path, chain_folder: Path) -> None:
    """The awaits are counted; there is a run that is cancelled at each of them, one after the other."""

    async def use(client: AsyncClient, number: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        async with await client.generate([number % 500, 2, 3], params) as answer:
            async for _ in answer:
                pass

    async def main(socket: Path) -> None:
        async with await AsyncClient.connect(socket, tokenizer=load_tokenizer(chain_folder)) as client:
            await client.wait_ready(20)
            at = 0
            while True:
                run = Scripted(use(client, at), at)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait_for(run, 10)
                if not run.reached:
                    break
                at += 1
                await settle(client)
            assert at >= 2
            await wave(client)
            await settle(client)

    with running_core(tmp_path, config()) as core:
        asyncio.run(main(core.socket))


def test_http_clients_that_leave_at_any_moment(stack: Stack) -> None:
    draw = random.Random(3)
    live = stack.live
    for number in range(300):
        connection = connect(live.url)
        length, n = draw.choice([1, 30, 200]), draw.choice([1, 1, 3])
        body = {"prompt": [number % 500] * length, "n": n, "stream": draw.random() < 0.5, "max_tokens": 40}
        data = request({**body, "ignore_eos": True})
        connection.sendall(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data)
        if draw.random() < 0.5:
            connection.settimeout(draw.random() * 0.02)
            with contextlib.suppress(TimeoutError):
                connection.recv(100)
        leave(connection, draw.choice(["fin", "rst"]))
    stack.settle(10.0)
    live.run(wave(live.client))
    stack.settle(10.0)


def mixed(http: httpx.Client, count: int, start: int, draw: random.Random) -> None:
    """Short requests of every fate."""
    for number in range(start, start + count):
        kind = draw.randrange(6)
        body: dict[str, Any] = {"prompt": [number % 500, number // 500 % 500, 7], "max_tokens": 3, "ignore_eos": True}
        headers = {"x-request-id": f"id-{number}"}
        if kind == 0:
            body |= {"logprobs": 5, "cache_salt": f"salt {number}"}
        elif kind == 1:
            body |= {"temperature": -1}
        elif kind == 2:
            body |= {f"field-{number}": 1}
        elif kind == 3:
            body |= {"stream": True, "max_tokens": 400}
            with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                next(answer.iter_lines())
            continue
        elif kind == 4:
            body = {"messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 2}
        path = "/v1/chat/completions" if kind == 4 else "/v1/completions"
        assert http.post(path, json=body, headers=headers).status_code in (200, 400)


def slope(samples: list[int], every: int) -> float:
    """Bytes a request, by least squares."""
    count = len(samples)
    middle, mean = (count - 1) / 2, sum(samples) / count
    above = sum((place - middle) * (value - mean) for place, value in enumerate(samples))
    return above / sum((place - middle) ** 2 for place in range(count)) / every


@pytest.mark.parametrize(
    ("warm", "rounds", "every", "limit"),
    [(600, 4, 150, 6000.0), pytest.param(1500, 10, 500, 1024.0, marks=pytest.mark.slow)],
)
def test_memory_is_flat(chain_folder: Path, warm: int, rounds: int, every: int, limit: float) -> None:
    """After a warm-up no process grows by more than `limit` bytes a request; tasks, files and threads stay."""
    draw = random.Random(11)
    with Served(chain_folder, "--num-kv-blocks", "256") as server:
        mixed(server.http, warm, 0, draw)
        server.settle()
        before = [(each.num_threads(), each.num_fds()) for each in server.tree()]
        samples: list[list[int]] = []
        for number in range(rounds):
            mixed(server.http, every, warm + number * every, draw)
            server.settle()
            samples.append(server.memory())
        growth = [slope(list(own), every) for own in zip(*samples, strict=True)]
        sys.stdout.write(f"bytes a request: {[round(each) for each in growth]} (frontend, core, executor)\n")
        assert max(growth) < limit, (growth, samples)
        after = [(each.num_threads(), each.num_fds()) for each in server.tree()]
        pairs = [pair for old, new in zip(before, after, strict=True) for pair in zip(old, new, strict=True)]
        assert all(abs(old - new) <= 2 for old, new in pairs)


def test_refused_submissions_leave_nothing(tmp_path: Path) -> None:
    """A submission that is refused before it is sent leaves nothing either."""
    with LiveServer(tmp_path) as live:

        async def refuse() -> None:
            for _ in range(200):
                with pytest.raises(FrontendError):
                    live.client.submit([2**40], SamplingParams())

        live.run(refuse())
        assert live.client.open_generations == 0
