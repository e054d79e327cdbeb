"""The client of the engine core for programs with an event loop; the HTTP server is one of them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from engine_core.wire import client as wire
from engine_core.wire.codec import pack_ids
from engine_core.wire.errors import Backpressure, MalformedFrame
from engine_core.wire.sampling import SamplingParams
from frontend.connection import Connection
from frontend.errors import EngineDead, EngineTimeout, RequestRejected
from frontend.generation import Generation, Stream, TextGeneration
from frontend.tokenizer.base import Tokenizer
from frontend.tokenizer.load import load_tokenizer
from frontend.tokenizer.pool import TextPool

DEFAULT_SILENCE_S: Final = 5.0
DEFAULT_BACKLOG_BYTES: Final = 4_194_304


class AsyncClient:
    """A client of an engine core; make one with `connect`, end it with `close` or `async with`.

    All methods belong to the event loop that called `connect`. When the engine is gone, `fatal` says why and every
    open generation raises EngineDead.

    Attributes:
        state: of the engine, as last heard; reason: why, where it is not "ready".
        ready: what the engine said when it was up; None before.
        status: the latest answer to a ping; None before the first.
        model_path: folder of the model.
        config_hash: of the configuration the core runs.
    """

    def __init__(
        self,
        socket: Path,
        *,
        max_backlog_bytes: int,
        silence_s: float,
        tokenizer: Tokenizer | None,
        on_progress: Callable[[wire.Progress], None] | None,
    ) -> None:
        self.state: wire.EngineState = "loading"
        self.reason = ""
        self.ready: wire.Ready | None = None
        self.status: wire.Status | None = None
        self.model_path = ""
        self.config_hash = ""
        self._on_progress = on_progress
        self._tokenizer = tokenizer
        self._texts = TextPool(workers=1)
        self._max_backlog_bytes = max_backlog_bytes
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Stream] = {}
        self._unsent_aborts: set[str] = set()
        self._prefix = secrets.token_hex(6)
        self._count = 0
        self._inspections: dict[int, asyncio.Future[wire.Inspection]] = {}
        self._status_at = 0.0
        self._welcomed = asyncio.Event()
        self._settled = asyncio.Event()
        self._connection = Connection(
            socket,
            silence_s=silence_s,
            on_message=self._handle,
            on_dead=self._ended,
            before_ping=self._flush_aborts,
        )

    @classmethod
    async def connect(
        cls,
        socket: Path,
        *,
        name: str = "python",
        deadline_s: float = 10.0,
        tokenizer: Tokenizer | None = None,
        on_progress: Callable[[wire.Progress], None] | None = None,
        max_backlog_bytes: int = DEFAULT_BACKLOG_BYTES,
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> AsyncClient:
        """Connect and wait for the core's welcome; the model may still load (wait_ready).

        Args:
            socket: the core's socket, as `tercet serve` prints it.
            name: who this is, for the core's log; at most 64 characters.
            deadline_s: seconds to wait for the welcome.
            tokenizer: for text prompts; None: the model folder's, read when it is first needed.
            on_progress: called with each Progress of the start.
            max_backlog_bytes: most that may wait to be read of one generation; more aborts it.
            silence_s: a core that says nothing for so long is dead.

        Raises:
            EngineTimeout: no core answered.
            EngineDead: it speaks another protocol, or is gone.
        """
        client = cls(
            socket,
            max_backlog_bytes=max_backlog_bytes,
            silence_s=silence_s,
            tokenizer=tokenizer,
            on_progress=on_progress,
        )
        try:
            client._connection.send(wire.Hello(wire.PROTOCOL, name))
            await client._wait(client._welcomed, f"the welcome of the engine core at {socket}", deadline_s)
            client._connection.start_pings()
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def fatal(self) -> wire.Fatal | None:
        """Why the engine is gone for this client; None while it lives."""
        return self._connection.fatal

    @property
    def model(self) -> wire.Model | None:
        """The served model; None before the engine is ready."""
        return None if self.ready is None else self.ready.model

    @property
    def status_age_s(self) -> float:
        """Seconds since the latest Status; infinite before the first."""
        return time.monotonic() - self._status_at if self._status_at else float("inf")

    @property
    def open_generations(self) -> int:
        """Generations that have not ended."""
        return len(self._streams)

    async def wait_ready(self, deadline_s: float) -> wire.Ready:
        """Wait until the engine takes requests.

        Raises:
            EngineDead: it ended instead.
            EngineTimeout: `deadline_s` passed.
        """
        await self._wait(self._settled, "the engine's readiness", deadline_s)
        assert self.ready is not None
        return self.ready

    async def inspect(self, deadline_s: float) -> wire.Inspection:
        """Have the core check its invariants now.

        Raises:
            EngineDead: the engine is gone.
            EngineTimeout: `deadline_s` passed.
        """
        self._count += 1
        seq = self._count
        answer: asyncio.Future[wire.Inspection] = self._loop.create_future()
        self._inspections[seq] = answer
        try:
            self._connection.send(wire.Inspect(seq))
            return await asyncio.wait_for(answer, deadline_s)
        except TimeoutError as error:
            raise EngineTimeout("the inspection of the engine core", deadline_s) from error
        finally:
            del self._inspections[seq]

    def drain(self) -> None:
        """Ask the core to take nothing new; only the frontend that owns the core may.

        Raises:
            EngineDead: the engine is gone.
            Backpressure: the core does not read.
        """
        self._connection.send(wire.Drain())

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generation:
        """Send a request of token ids; nothing is awaited, so that no cancellation can fall in between.

        Args:
            prompt_ids: ids of the prompt.
            params: sampling and stopping.
            request_id: unique among this client's open requests, 1 to 128 characters; None: made here.
            priority: smaller is more urgent.
            cache_salt: requests share cached prefixes only with requests of the same salt.

        Raises:
            EngineDead: the engine is gone.
            RequestRejected: an id does not fit, the request id is in use, or the core does not read. What the core
                itself finds wrong is raised when the generation is read.
        """
        self._count += 1
        name = request_id if request_id is not None else f"{self._prefix}-{self._count:x}"
        if name in self._streams:
            raise RequestRejected("duplicate_id", f"request_id: {name!r} is in use", field="request_id")
        try:
            prompt = pack_ids(prompt_ids)
        except OverflowError as error:
            raise RequestRejected("invalid", "prompt: a token id does not fit 32 bits", field="prompt") from error
        submit = wire.Submit(name, prompt, params, priority, cache_salt)
        # An abort that could not be sent yet would end a new request of the same id.
        self._flush_aborts()
        if name in self._unsent_aborts:
            raise RequestRejected("queue_full", "the engine core does not read", retry_after_s=1.0)
        try:
            self._connection.send(submit)
        except Backpressure as error:
            raise RequestRejected("queue_full", "the engine core does not read", retry_after_s=1.0) from error
        stream = Stream(submit, self._loop, self._max_backlog_bytes, self._abort)
        self._streams[name] = stream
        return Generation(stream)

    async def tokenizer(self) -> Tokenizer:
        """The tokenizer for text prompts; read from the model folder when it is first asked for.

        Raises:
            TokenizerError, ModelFolderError: the folder's files are broken.
        """
        if self._tokenizer is None:
            self._tokenizer = await self._texts.run(partial(load_tokenizer, Path(self.model_path)))
        return self._tokenizer

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> TextGeneration:
        """Send a request and get its text.

        Args:
            prompt: text, or token ids; text is encoded with the model's tokenizer, off the event loop.
            params: sampling and stopping.
            stop: texts that end the answer where they first appear; none may be empty.
            include_stop: whether the text that ended it belongs to the answer.
            skip_special: leave special tokens out of the text.
            request_id, priority, cache_salt: as in `submit`.

        Raises:
            RequestRejected: a stop string is empty; else as in `submit`.
            EngineDead: as in `submit`.
            TextOverload: too many texts wait to be encoded.
            TokenizerError, ModelFolderError: as in `tokenizer`.
        """
        if not all(stop):
            raise RequestRejected("invalid", "stop: a stop string must not be empty", field="stop")
        tokenizer = await self.tokenizer()
        ids = await self._texts.run(partial(tokenizer.encode, prompt)) if isinstance(prompt, str) else prompt
        generation = self.submit(ids, params, request_id=request_id, priority=priority, cache_salt=cache_salt)
        return TextGeneration(
            generation, tokenizer, ids, params, stop=stop, include_stop=include_stop, skip_special=skip_special
        )

    async def close(self) -> None:
        """Leave: open generations end with EngineDead, the core aborts their requests."""
        self._texts.close()
        await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _wait(self, event: asyncio.Event, what: str, deadline_s: float) -> None:
        try:
            await asyncio.wait_for(event.wait(), deadline_s)
        except TimeoutError as error:
            raise EngineTimeout(what, deadline_s) from error
        if self.fatal is not None:
            raise EngineDead(self.fatal.message, self.fatal.code)

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._unsent_aborts.add(request_id)
            self._flush_aborts()

    def _flush_aborts(self) -> None:
        # A core that does not read now gets them with the next ping; one that is gone needs none.
        if self._unsent_aborts:
            with contextlib.suppress(Backpressure, EngineDead):
                self._connection.send(wire.Abort(sorted(self._unsent_aborts)))
                self._unsent_aborts.clear()

    def _handle(self, message: wire.CoreToClient) -> None:
        match message:
            case wire.Outputs():
                self._on_outputs(message)
            case wire.Status():
                self.status, self.state, self.reason = message, message.state, message.reason
                self._status_at = time.monotonic()
            case wire.Rejected():
                self._on_rejected(message)
            case _:
                self._handle_rare(message)

    def _handle_rare(self, message: wire.CoreToClient) -> None:
        match message:
            case wire.Ready():
                self.ready, self.state, self.reason = message, "ready", ""
                self._settled.set()
            case wire.Welcome():
                self._on_welcome(message)
            case wire.Inspection():
                waiting = self._inspections.get(message.seq)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case wire.Progress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case _:
                raise MalformedFrame(f"unexpected {type(message).__name__}")

    def _on_welcome(self, message: wire.Welcome) -> None:
        self.state, self.model_path, self.config_hash = message.state, message.model_path, message.config_hash
        if message.protocol != wire.PROTOCOL:
            known = f"the engine core speaks protocol {message.protocol}, this client {wire.PROTOCOL}"
            self._connection.die("protocol", known)
        self._welcomed.set()

    def _on_outputs(self, message: wire.Outputs) -> None:
        for output in message.items:
            # What crosses an abort finds no stream.
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish is not None:
                del self._streams[output.request_id]
            stream.feed(output)

    def _on_rejected(self, message: wire.Rejected) -> None:
        stream = self._streams.pop(message.request_id, None)
        if stream is not None:
            error = RequestRejected(
                message.code, message.message, message.field, message.limit, message.given, message.retry_after_s
            )
            stream.fail(error)

    def _ended(self, fatal: wire.Fatal) -> None:
        self.state, self.reason = "dead", fatal.message
        self._unsent_aborts.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDead(fatal.message, fatal.code))
        for waiting in self._inspections.values():
            if not waiting.done():
                waiting.set_exception(EngineDead(fatal.message, fatal.code))
        self._welcomed.set()
        self._settled.set()
