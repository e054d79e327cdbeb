"""The blocking Client against a fake core on the real wire."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core.wire.sampling import SamplingParams
from frontend.client import Client, LoopThread
from frontend.errors import EngineDead, EngineTimeout, RequestRejected
from tests.fakes.waiting import until
from tests.frontend.core_thread import CoreThread

A = SamplingParams(max_tokens=3)
LONG = SamplingParams(max_tokens=100_000)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[CoreThread]:
    """A running fake core."""
    made = CoreThread(tmp_path)
    yield made
    made.stop()


def threads() -> list[str]:
    """Threads of clients that run."""
    return [thread.name for thread in threading.enumerate() if thread.name == "tercet client"]


def test_text_and_tokens(core: CoreThread) -> None:
    with Client(core.core.path) as client:
        client.wait_ready(5)
        assert "".join(delta.text for delta in client.generate("a", A)) == "bcd"
        assert [token for output in client.submit([*b"a"], A) for token in output.token_ids] == [*b"bcd"]
        assert client.tokenizer().vocab_size == 512
        assert client.model_path == core.core.path.parent
        assert client.inspect(5).violations == []
        until("a status", lambda: client.status is not None)
    assert threads() == []


def test_errors_are_raised_in_the_caller(core: CoreThread) -> None:
    with Client(core.core.path) as client:
        with pytest.raises(RequestRejected, match="stop"):
            client.generate("a", A, stop=[""])
        with pytest.raises(RequestRejected, match="32 bits"):
            client.submit([2**40], A)


@pytest.mark.parametrize("how", ["abort", "close", "with", "drop"])
def test_leaving_an_answer_aborts_it(core: CoreThread, how: str) -> None:
    with Client(core.core.path) as client:
        answer = client.generate("a", LONG)
        assert next(answer).text
        if how == "abort":
            answer.abort()
            assert [delta.finish for delta in answer][-1] == "abort"
        elif how == "close":
            answer.close()
        elif how == "with":
            with answer:
                assert answer.request_id
        else:
            del answer
        until("the core aborted it", lambda: len(core.core.aborted) == 1)


def test_close_ends_an_answer_that_another_thread_reads(core: CoreThread) -> None:
    client = Client(core.core.path)
    core.core.gate.clear()
    answer = client.submit([*b"a"], LONG)
    seen: list[BaseException] = []

    def read() -> None:
        try:
            next(answer)
        except EngineDead as error:
            seen.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    until("it is there", lambda: len(core.core.live) == 1)
    client.close()
    reader.join(10)
    assert [str(error) for error in seen] == ["the client was closed"]
    client.close()
    answer.abort()
    with pytest.raises(EngineDead):
        client.inspect(1)
    assert threads() == []


def test_several_threads_at_once(core: CoreThread) -> None:
    texts: list[str] = []
    with Client(core.core.path) as client:

        def use() -> None:
            texts.append("".join(delta.text for delta in client.generate("a", SamplingParams(max_tokens=10))))

        users = [threading.Thread(target=use) for _ in range(8)]
        for user in users:
            user.start()
        for user in users:
            user.join(10)
    assert texts == ["bcdefghijk"] * 8


def test_no_core(tmp_path: Path) -> None:
    with pytest.raises(EngineTimeout):
        Client(tmp_path / "none.sock", deadline_s=0.1)
    assert threads() == []


def test_what_fails_in_the_loop_fails_in_the_caller_and_the_loop_ends_once() -> None:
    loop = LoopThread()

    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        loop.run(late())
    loop.stop()
    loop.stop()
    assert not loop.alive
    with pytest.raises(EngineDead):
        loop.run(late())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts; a process in the background of a shell inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_caller_cancels_the_work() -> None:
    loop = LoopThread()
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    # As Ctrl-C does, but only when the work has begun.
    caller = threading.get_ident()

    def interrupt() -> None:
        assert begun.wait(5)
        signal.pthread_kill(caller, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert ended.wait(5)
    sender.join()
    loop.stop()
