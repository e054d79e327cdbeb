"""Clients of the engine core for Python programs, beside a running server.

AsyncClient is for programs with an event loop, Client for all others:

    with Client(socket) as client:
        for delta in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(delta.text, end="")

The socket is what `tercet serve` prints, or what its --client-socket says.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from engine_core.wire.client import Inspection, Output, Ready, Status
from engine_core.wire.sampling import SamplingParams
from frontend.async_client import DEFAULT_BACKLOG_BYTES, AsyncClient
from frontend.errors import EngineDead
from frontend.generation import Delta, Generation, TextGeneration
from frontend.link import DEFAULT_RETURN_S
from frontend.tokenizer.base import Tokenizer

__all__ = ["Answer", "AsyncClient", "Client"]

T = TypeVar("T")

# How often a blocked caller looks whether the loop's thread still runs.
LOOK_S: Final = 1.0
CLOSE_S: Final = 5.0


class Errand(Generic[T]):
    """Work for a loop that can be called off before it has begun. Methods run in the loop's thread."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    async def run(self) -> T:
        """Do it."""
        if self._cancelled:
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        return await self._work

    def cancel(self) -> None:
        """Call it off; nothing happens when it is done."""
        self._cancelled = True
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tercet client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop do the work, and wait for it; an interrupt here cancels it there.

        Raises:
            EngineDead: the loop was closed.
        """
        if not self._thread.is_alive():
            work.close()
            raise EngineDead("the client was closed")
        errand = Errand(work)
        try:
            future = asyncio.run_coroutine_threadsafe(errand.run(), self._loop)
            while True:
                try:
                    return future.result(LOOK_S)
                except concurrent.futures.TimeoutError:
                    if future.done():
                        raise
                    if not self._thread.is_alive():
                        raise EngineDead("the client was closed") from None
        except BaseException:
            # An interrupt may come before `future` is bound, so the errand itself is told.
            self.call(errand.cancel)
            raise

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def call(self, act: Callable[[], None]) -> None:
        """Have the loop call `act`, without waiting; nothing happens after the end."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act)

    def stop(self) -> None:
        """End the loop and its thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


class Answer(Generic[T]):
    """A blocking iterator over an answer. Leaving it (close, `with`, dropping it) aborts the request.

    Iterating raises what Generation raises.
    """

    def __init__(self, loop: LoopThread, source: Generation | TextGeneration, items: AsyncIterator[T]) -> None:
        self._loop = loop
        self._source = source
        self._items = items

    @property
    def request_id(self) -> str:
        """The id the request was submitted with."""
        return self._source.request_id

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        found, item = self._loop.run(_next(self._items))
        if not found:
            raise StopIteration
        assert item is not None
        return item

    def abort(self) -> None:
        """End the request now, from any thread; iterating gives what came, and then ends with finish "abort"."""
        self._loop.call(self._source.abort)

    def close(self) -> None:
        """The same as abort."""
        self.abort()

    def __enter__(self) -> Answer[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __del__(self) -> None:
        self.abort()


class Client:
    """A blocking client; see AsyncClient for what the arguments mean and what the methods raise.

    Any thread may use it, and several at once.
    """

    def __init__(
        self,
        socket: Path | str,
        *,
        name: str = "python",
        deadline_s: float = 10.0,
        tokenizer: Tokenizer | None = None,
        max_backlog_bytes: int = DEFAULT_BACKLOG_BYTES,
        silence_s: float | None = None,
        return_s: float = DEFAULT_RETURN_S,
    ) -> None:
        self._loop = LoopThread()
        connecting = AsyncClient.connect(
            Path(socket),
            name=name,
            deadline_s=deadline_s,
            tokenizer=tokenizer,
            max_backlog_bytes=max_backlog_bytes,
            silence_s=silence_s,
            return_s=return_s,
        )
        try:
            self._client = self._loop.run(connecting)
        except BaseException:
            self._loop.stop()
            raise

    @property
    def status(self) -> Status | None:
        """The engine's latest status."""
        return self._client.status

    @property
    def model_path(self) -> Path:
        """Folder of the model."""
        return Path(self._client.model_path)

    def wait_ready(self, deadline_s: float) -> Ready:
        """Wait until the engine takes requests."""
        return self._loop.run(self._client.wait_ready(deadline_s))

    def inspect(self, deadline_s: float) -> Inspection:
        """Have the core check its invariants now."""
        return self._loop.run(self._client.inspect(deadline_s))

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loop.run(self._client.tokenizer())

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Answer[Output]:
        """Send a request of token ids; gives its Outputs."""

        async def submit() -> Generation:
            return self._client.submit(
                prompt_ids, params, request_id=request_id, priority=priority, cache_salt=cache_salt
            )

        generation = self._loop.run(submit())
        return Answer(self._loop, generation, generation)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Answer[Delta]:
        """Send a request; gives its text."""
        sending = self._client.generate(
            prompt,
            params,
            stop=stop,
            include_stop=include_stop,
            skip_special=skip_special,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        generation = self._loop.run(sending)
        return Answer(self._loop, generation, generation)

    def close(self) -> None:
        """Leave: open answers end with EngineDead. A second call does nothing."""
        if self._loop.alive:
            self._loop.run(self._client.close())
        self._loop.stop()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next(items: AsyncIterator[T]) -> tuple[bool, T | None]:
    # StopAsyncIteration cannot pass through a future.
    try:
        return True, await anext(items)
    except StopAsyncIteration:
        return False, None
