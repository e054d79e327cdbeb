"""AsyncClient against a fake core on the real wire."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine_core.wire.client import Fatal, Progress, Rejected, Submit, Welcome
from engine_core.wire.codec import unpack_ids
from engine_core.wire.errors import Backpressure
from engine_core.wire.sampling import SamplingParams
from frontend.async_client import AsyncClient
from frontend.errors import BacklogExceeded, EngineDead, EngineTimeout, RequestRejected
from tests.fakes.core import FakeCore, fake_model
from tests.fixtures.bbpe import Bbpe, write_bbpe

A = SamplingParams(max_tokens=3)
LONG = SamplingParams(max_tokens=1000)


async def until(what: str, holds: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for a state."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.002)


@asynccontextmanager
async def core(folder: Path, *, ready: bool = True, step_s: float = 0.0) -> AsyncIterator[FakeCore]:
    """A fake core whose model folder has the BBPE tokenizer."""
    write_bbpe(folder, Bbpe())
    fake = FakeCore(folder / "core.sock", fake_model(str(folder)), step_s=step_s)
    await fake.start(ready=ready)
    try:
        yield fake
    finally:
        await fake.stop()


def test_a_request_from_submit_to_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with core(tmp_path) as fake, await AsyncClient.connect(fake.path) as client:
            ready = await client.wait_ready(5)
            assert client.model == ready.model
            assert client.state == "ready"
            generation = client.submit([*b"a"], A, request_id="mine", priority=3, cache_salt="s")
            tokens: list[int] = []
            async for output in generation:
                tokens += output.token_ids
            assert tokens == [*b"bcd"]
            assert output.finish == "length"
            assert output.times is not None
            (sent,) = fake.submits
            assert (sent.request_id, sent.priority, sent.cache_salt) == ("mine", 3, "s")
            assert unpack_ids(sent.prompt).tolist() == [*b"a"]
            assert client.open_generations == 0

    asyncio.run(scenario())


def test_text_in_and_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with core(tmp_path) as fake, await AsyncClient.connect(fake.path) as client:
            answer = await client.generate("a", LONG, stop=["fg"])
            deltas = [delta async for delta in answer]
            assert "".join(delta.text for delta in deltas) == "bcde"
            assert (deltas[-1].finish, deltas[-1].stop_reason) == ("stop", "fg")
            await until("the request is aborted", lambda: fake.aborted == [answer.request_id])
            same = await client.generate([*b"a"], A)
            assert "".join([delta.text async for delta in same]) == "bcd"
            alone = await client.generate("a", LONG, stop="fg")
            assert "".join([delta.text async for delta in alone]) == "bcde"
            for stop in ("", [""]):
                with pytest.raises(RequestRejected, match="stop"):
                    await client.generate("a", A, stop=stop)

    asyncio.run(scenario())


def test_start_is_shown_and_awaited(tmp_path: Path) -> None:
    async def scenario() -> None:
        seen: list[Progress] = []
        async with (
            core(tmp_path, ready=False) as fake,
            await AsyncClient.connect(fake.path, on_progress=seen.append) as client,
        ):
            assert (client.state, client.ready, client.model) == ("loading", None, None)
            with pytest.raises(EngineTimeout, match="readiness"):
                await client.wait_ready(0.05)
            fake.tell_all(Progress("load", 1, 2))
            fake.become_ready()
            await client.wait_ready(5)
            assert seen == [Progress("load", 1, 2)]

    asyncio.run(scenario())


def test_status_and_inspection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with core(tmp_path) as fake, await AsyncClient.connect(fake.path) as client:
            await until("a status", lambda: client.status is not None)
            inspection = await client.inspect(5)
            assert (inspection.total, inspection.violations) == (1024, [])
            client.drain()
            await until("drained", lambda: fake.drained)

    asyncio.run(scenario())


def test_no_core_and_another_protocol(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(EngineTimeout, match="welcome"):
            await AsyncClient.connect(tmp_path / "none.sock", deadline_s=0.1)
        async with core(tmp_path) as fake:
            fake._hello = lambda client: fake._send(client, Welcome(99, "", "ready", ""))  # type: ignore[method-assign]
            with pytest.raises(EngineDead, match="protocol 99"):
                await AsyncClient.connect(fake.path)

    asyncio.run(scenario())


def test_rejections_carry_the_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with core(tmp_path) as fake, await AsyncClient.connect(fake.path) as client:
            fake.reject = lambda submit: Rejected(
                submit.request_id, "queue_full", "too many", field="prompt", limit=1, given=2, retry_after_s=3.0
            )
            with pytest.raises(RequestRejected, match="too many") as caught:
                await anext(client.submit([1], A))
            error = caught.value
            assert (error.reject_code, error.field, error.limit, error.given) == ("queue_full", "prompt", 1, 2)
            assert error.retry_after_s == 3.0
            assert client.open_generations == 0

    asyncio.run(scenario())


def test_what_is_wrong_on_this_side_is_not_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with core(tmp_path) as fake, await AsyncClient.connect(fake.path) as client:
            fake.gate.clear()
            first = client.submit([1], LONG, request_id="x")
            with pytest.raises(RequestRejected, match="in use"):
                client.submit([1], A, request_id="x")
            with pytest.raises(RequestRejected, match="32 bits"):
                client.submit([2**31], A)
            # The core could not even say which request it refuses.
            for name in ("", "x" * 129):
                with pytest.raises(RequestRejected, match=rf"request_id: 1 to 128 characters, given {len(name)}"):
                    client.submit([1], A, request_id=name)
            await until("one request", lambda: len(fake.submits) == 1)
            assert client.open_generations == 1
            first.abort()

    asyncio.run(scenario())


def test_ids_of_clients_and_requests_differ(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with core(tmp_path) as fake:
            clients = [await AsyncClient.connect(fake.path) for _ in range(2)]
            generations = [client.submit([*b"a"], A) for client in clients for _ in range(3)]
            assert len({generation.request_id for generation in generations}) == 6
            for generation in generations:
                assert sum([len(output.token_ids) async for output in generation]) == 3
            for client in clients:
                await client.close()

    asyncio.run(scenario())


def test_two_clients_with_the_same_request_id(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            core(tmp_path) as fake,
            await AsyncClient.connect(fake.path) as one,
            await AsyncClient.connect(fake.path) as two,
        ):
            first, second = one.submit([*b"a"], A, request_id="x"), two.submit([*b"k"], A, request_id="x")
            assert [t async for output in first for t in output.token_ids] == [*b"bcd"]
            assert [t async for output in second for t in output.token_ids] == [*b"lmn"]

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["fatal", "vanish"])
def test_every_open_generation_hears_of_the_end(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        async with core(tmp_path) as fake, await AsyncClient.connect(fake.path, return_s=0.3) as client:
            fake.gate.clear()
            generations = [client.submit([*b"a"], LONG) for _ in range(5)]
            waiting = [asyncio.ensure_future(anext(generation)) for generation in generations]
            inspecting = asyncio.ensure_future(client.inspect(5))
            await until("all are there", lambda: len(fake.submits) == 5)
            await inspecting
            started = time.monotonic()
            if how == "fatal":
                fake.die("executor_died", "killed by signal 9")
            else:
                await fake.stop()
            for future in waiting:
                with pytest.raises(EngineDead, match="signal 9" if how == "fatal" else "closed the connection"):
                    await future
            assert time.monotonic() - started < 5
            assert client.state == "dead"
            assert isinstance(client.fatal, Fatal)
            assert client.open_generations == 0
            for act in (lambda: client.submit([1], A), client.drain):
                with pytest.raises(EngineDead):
                    act()
            with pytest.raises(EngineDead):
                await client.inspect(1)
            with pytest.raises(EngineDead):
                await client.wait_ready(1)

    asyncio.run(scenario())


def test_close_ends_open_generations_and_tells_the_core(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with core(tmp_path) as fake:
            fake.gate.clear()
            client = await AsyncClient.connect(fake.path)
            generation = client.submit([*b"a"], LONG)
            await until("it is there", lambda: len(fake.live) == 1)
            await client.close()
            with pytest.raises(EngineDead, match="closed"):
                await anext(generation)
            await until("the core aborted it", lambda: not fake.live)
            await client.close()
            with pytest.raises(EngineDead, match="closed"):
                await client.generate("a", A)

    asyncio.run(scenario())


def test_an_answer_that_nobody_reads_is_cut(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            core(tmp_path) as fake,
            await AsyncClient.connect(fake.path, max_backlog_bytes=20_000) as client,
        ):
            lazy, eager = client.submit([*b"a"], LONG), client.submit([*b"a"], LONG)
            count = 0
            async for output in eager:
                count += len(output.token_ids)
            assert count == 1000
            await until("the other is aborted", lambda: fake.aborted == [lazy.request_id])
            with pytest.raises(BacklogExceeded, match="20000"):
                await anext(lazy)
            assert client.open_generations == 0

    asyncio.run(scenario())


def test_aborts_that_cannot_be_sent_go_with_a_later_ping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with core(tmp_path) as fake, await AsyncClient.connect(fake.path) as client:
            fake.gate.clear()
            generation = client.submit([*b"a"], LONG, request_id="x")
            await until("it is there", lambda: len(fake.live) == 1)

            def full(*_: object) -> None:
                raise Backpressure("full")

            with monkeypatch.context() as patch:
                patch.setattr("frontend.connection.send_now", full)
                generation.abort()
                generation.abort()
                for name in ("x", "y"):
                    with pytest.raises(RequestRejected, match="does not read"):
                        client.submit([1], A, request_id=name)
            assert client.open_generations == 0
            await until("the abort came", lambda: fake.aborted == ["x"])

    asyncio.run(scenario())


class TestCancellation:
    """A cancelled task leaves nothing behind, wherever it stood."""

    def test_at_every_await(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with core(tmp_path) as fake, await AsyncClient.connect(fake.path) as client:

                async def use() -> None:
                    answer = await client.generate("a", SamplingParams(max_tokens=20))
                    async for _ in answer:
                        pass

                done = False
                turns = 0
                while not done:
                    task = asyncio.ensure_future(use())
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    done = task.done()
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    del task
                    turns += 1
                    assert turns < 20_000
                gc.collect()
                await until("nothing is open here", lambda: client.open_generations == 0)
                await until("nothing is open there", lambda: not fake.live)
                assert turns > 5

        asyncio.run(scenario())

    def test_a_thousand_times_at_random(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            chance = random.Random(7)
            async with core(tmp_path) as fake, await AsyncClient.connect(fake.path) as client:
                await client.tokenizer()

                async def use() -> None:
                    async with client.submit([*b"a"], SamplingParams(max_tokens=50)) as generation:
                        async for _ in generation:
                            if chance.random() < 0.1:
                                generation.abort()

                async def cancelled() -> None:
                    task = asyncio.ensure_future(use())
                    for _ in range(chance.randrange(40)):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

                for _ in range(25):
                    await asyncio.gather(*[cancelled() for _ in range(40)])
                await until("nothing is open here", lambda: client.open_generations == 0)
                await until("nothing is open there", lambda: not fake.live)
                assert client._requests._unsent_aborts == set()
                survivor = client.submit([*b"a"], A)
                assert [t async for output in survivor for t in output.token_ids] == [*b"bcd"]

        asyncio.run(scenario())

    def test_while_connecting(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            connecting = asyncio.ensure_future(AsyncClient.connect(tmp_path / "none.sock"))
            await asyncio.sleep(0.05)
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting

        asyncio.run(scenario())


def test_a_request_that_goes_on_after_a_restart_of_the_core(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with core(tmp_path, step_s=0.001) as fake, await AsyncClient.connect(fake.path) as client:
            generation = client.submit([*b"a"], LONG)
            seen = [t for _ in range(3) for t in (await anext(generation)).token_ids]
            resumed: Submit = generation.resumed()
            assert unpack_ids(resumed.output).tolist()[: len(seen)] == seen
            assert resumed.prompt == fake.submits[0].prompt
            generation.abort()

    asyncio.run(scenario())
