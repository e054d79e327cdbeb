"""The connection to an engine core: how its end is noticed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from engine_core.wire.client import CoreToClient, Fatal, Hello, Outputs, Ping, Status
from engine_core.wire.codec import core_to_client
from engine_core.wire.transport import bind_router, connect_dealer
from frontend.connection import Connection
from frontend.errors import EngineDead


class Bench:
    """A bare ROUTER and a Connection to it."""

    def __init__(self, router: zmq.asyncio.Socket, connection: Connection, peer: bytes) -> None:
        self.router, self.connection, self.peer = router, connection, peer
        self.messages: list[CoreToClient] = []
        self.dead: list[Fatal] = []
        self.before_pings = 0

    async def say(self, *frames: bytes) -> None:
        """Send raw frames."""
        await self.router.send_multipart([self.peer, *frames])

    async def until(self, holds: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait for a state."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    """A connection that has said hello."""
    context = zmq.asyncio.Context()
    router = bind_router(context, folder / "core.sock")
    made: list[Bench] = []

    def ping() -> None:
        made[0].before_pings += 1

    connection = Connection(
        folder / "core.sock",
        on_message=lambda message: made[0].messages.append(message),
        on_dead=lambda fatal: made[0].dead.append(fatal),
        before_ping=ping,
    )
    connection.send(Hello(1, "test"))
    peer, _ = await asyncio.wait_for(router.recv_multipart(), 5)
    made.append(Bench(router, connection, peer))
    try:
        yield made[0]
    finally:
        await connection.close()
        router.close(linger=0)
        await asyncio.to_thread(context.term)


def encoded(message: CoreToClient) -> bytes:
    """The message as bytes."""
    return core_to_client().encode(message)


def test_messages_arrive_in_order_and_other_tasks_get_their_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as one:
            for step in range(500):
                await one.say(encoded(Outputs(step, [])))
            await one.until(lambda: len(one.messages) == 500)
            assert [message.step for message in one.messages if isinstance(message, Outputs)] == list(range(500))

    asyncio.run(scenario())


def test_a_fatal_ends_it_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as one:
            await one.say(encoded(Fatal("start_refused", "no such model")))
            await one.say(encoded(Fatal("internal", "later")))
            await one.until(lambda: bool(one.dead))
            with pytest.raises(EngineDead, match="no such model") as caught:
                one.connection.send(Ping(1))
            assert caught.value.code == "start_refused"
        assert [fatal.message for fatal in one.dead] == ["no such model"]

    asyncio.run(scenario())


@pytest.mark.parametrize("frame", [b"", b"\xff" * 40, b"\x80\x04N.", b"\x92\xa7unknown\x01", b"[" * 1000])
def test_a_frame_that_is_no_message_ends_it(tmp_path: Path, frame: bytes) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as one:
            await one.say(frame)
            await one.until(lambda: bool(one.dead))
            assert one.dead[0].code == "protocol"

    asyncio.run(scenario())


def test_a_core_that_goes_is_noticed_at_once_and_its_last_words_are_heard(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as one:
            one.router.close(linger=0)
            await one.until(lambda: bool(one.dead), seconds=2.0)
            assert one.dead[0].message == "the engine core closed the connection"
        async with bench(tmp_path) as two:
            await two.say(encoded(Fatal("executor_died", "out of memory")))
            two.router.close(linger=500)
            await two.until(lambda: bool(two.dead))
            assert two.dead[0].message == "out of memory"

    asyncio.run(scenario())


def test_a_silent_core_is_dead_after_a_while(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as one:
            one.connection.start_pings(1.0)
            await one.until(lambda: one.before_pings >= 2)
            await one.say(encoded(Status(1, "ready")))
            heard = time.monotonic()
            await one.until(lambda: bool(one.dead))
            assert one.dead[0].code == "stalled"
            assert time.monotonic() - heard > 0.9

    asyncio.run(scenario())


def test_a_program_that_blocks_its_own_loop_blames_no_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as one:
            one.connection.start_pings(1.0)
            await one.until(lambda: one.before_pings >= 1)
            time.sleep(2.0)  # noqa: ASYNC251 - the fault that the test is about
            await one.say(encoded(Status(1, "ready")))
            await one.until(lambda: len(one.messages) == 1)
            assert one.dead == []

    asyncio.run(scenario())


def test_a_fault_of_the_receiver_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as one:

            def fail(_: CoreToClient) -> None:
                raise RuntimeError("broken receiver")

            one.connection._on_message = fail
            await one.say(encoded(Status(1, "ready")))
            await one.until(lambda: bool(one.dead))
            assert one.dead[0] == Fatal("internal", "client: broken receiver")

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "client of the engine core" in caplog.text


def test_close_says_goodbye_and_can_be_called_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as one:
            await one.connection.close()
            await one.connection.close()
            _, frame = await asyncio.wait_for(one.router.recv_multipart(), 5)
            assert b"bye" in frame
            assert one.dead == [Fatal("internal", "the client was closed")]

    asyncio.run(scenario())


def test_close_without_a_core_does_not_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        connection = Connection(
            tmp_path / "none.sock",
            on_message=lambda _: None,
            on_dead=lambda _: None,
            before_ping=lambda: None,
        )
        connection.send(Hello(1, "test"))
        started = time.monotonic()
        await connection.close()
        assert time.monotonic() - started < 2.0

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_a_close_that_is_cancelled_leaves_no_context(turns: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as one:
            closing = asyncio.create_task(one.connection.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await one.until(lambda: one.connection._context.closed)

    asyncio.run(scenario())


def test_the_socket_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        socket = connect_dealer(context, tmp_path / "none.sock")
        assert socket.getsockopt(zmq.SNDHWM) == 4096
        socket.close(linger=0)
        context.term()

    asyncio.run(scenario())
