"""The client of the engine core for programs with an event loop; the HTTP server is one of them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from engine_core.wire import client as wire
from engine_core.wire.codec import pack_ids
from engine_core.wire.errors import Backpressure, MalformedFrame
from engine_core.wire.sampling import SamplingParams
from frontend.errors import EngineDead, EngineTimeout, RequestRejected
from frontend.generation import Generation, Stream, TextGeneration
from frontend.health import Signs, judge
from frontend.link import DEFAULT_RETURN_S, Ears, Link
from frontend.open_requests import OpenRequests
from frontend.recoveries import Recoveries
from frontend.tokenizer.base import Tokenizer
from frontend.tokenizer.load import load_tokenizer
from frontend.tokenizer.pool import TextPool

DEFAULT_BACKLOG_BYTES: Final = 4_194_304
SEED_BITS: Final = 63


def random_seed() -> int:
    """A seed that nobody can foresee."""
    return secrets.randbits(SEED_BITS)


class AsyncClient:
    """A client of an engine core; make one with `connect`, end it with `close` or `async with`.

    All methods belong to the event loop that called `connect`. When the core is lost, open generations pause until
    another one has taken its place, and then go on: no token is lost or repeated, and the results are those of an
    undisturbed run. When all is over, `fatal` says why and every open generation raises EngineDead.

    Attributes:
        status: the latest answer to a ping; None before the first.
        model_path: folder of the model.
        config_hash: of the configuration the core runs.
        recoveries: counts of processes that were replaced.
    """

    def __init__(
        self,
        socket: Path,
        *,
        name: str,
        max_backlog_bytes: int,
        silence_s: float | None,
        return_s: float,
        tokenizer: Tokenizer | None,
        on_progress: Callable[[wire.Progress], None] | None,
        draw_seed: Callable[[], int],
    ) -> None:
        self.status: wire.Status | None = None
        self.recoveries = Recoveries()
        self._engine: tuple[wire.EngineState, str] = ("loading", "the engine core starts")
        self._on_progress = on_progress
        self._draw_seed = draw_seed
        self._tokenizer = tokenizer
        self._texts = TextPool(workers=1)
        self._max_backlog_bytes = max_backlog_bytes
        self._loop = asyncio.get_running_loop()
        self._prefix = secrets.token_hex(6)
        self._count = 0
        self._inspections: dict[int, asyncio.Future[wire.Inspection]] = {}
        self._was_lost = False
        self._draining = False
        self._requests = OpenRequests(lambda message: self._link.send(message))
        ears = Ears(
            message=self._handle,
            ready=self._on_ready,
            lost=self._on_lost,
            ended=self._ended,
            before_ping=self._requests.flush,
        )
        self._link = Link(socket, name=name, silence_s=silence_s, return_s=return_s, ears=ears)

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
        silence_s: float | None = None,
        return_s: float = DEFAULT_RETURN_S,
        draw_seed: Callable[[], int] = random_seed,
    ) -> AsyncClient:
        """Connect and wait for the core's welcome; the model may still load (wait_ready).

        Args:
            socket: the core's socket, as `tercet serve` prints it.
            name: who this is, for the core's log; at most 64 characters.
            deadline_s: seconds to wait for the welcome.
            tokenizer: for text prompts; None: the model folder's, read when it is first needed.
            on_progress: called with each Progress of the start.
            max_backlog_bytes: most that may wait to be read of one generation; more aborts it.
            silence_s: a core that says nothing for so long is lost; None: the server's --step-timeout.
            return_s: seconds to look for another core when one is lost; 0: a loss is the end.
            draw_seed: gives the seed, 0 .. 2**63 - 1, of each request that brings none and is not greedy. It is drawn
                here, once, so that the request's result does not depend on which core continues it.

        Raises:
            EngineTimeout: no core answered.
            EngineDead: it speaks another protocol, or is gone.
        """
        client = cls(
            socket,
            name=name,
            max_backlog_bytes=max_backlog_bytes,
            silence_s=silence_s,
            return_s=return_s,
            tokenizer=tokenizer,
            on_progress=on_progress,
            draw_seed=draw_seed,
        )
        try:
            await client._link.open(deadline_s)
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def fatal(self) -> wire.Fatal | None:
        """Why the engine is gone for this client; None while it lives."""
        return self._link.fatal

    @property
    def lost(self) -> wire.Fatal | None:
        """Why there is no core at the moment; None while there is one, and when all is over."""
        return self._link.lost

    @property
    def ready(self) -> wire.Ready | None:
        """What the engine said when it was up; None before."""
        return self._link.ready

    @property
    def model_path(self) -> str:
        """Folder of the model."""
        return "" if self._link.welcome is None else self._link.welcome.model_path

    @property
    def config_hash(self) -> str:
        """Of the configuration that the core runs."""
        return "" if self._link.welcome is None else self._link.welcome.config_hash

    @property
    def signs(self) -> Signs:
        """What is known of the engine's health from here."""
        link, (engine, reason) = self._link, self._engine
        return Signs(
            dead=None if link.fatal is None else link.fatal.message,
            was_ready=link.ready is not None,
            lost=None if link.lost is None else link.lost.message,
            silent_s=link.silent_s,
            engine=engine,
            reason=reason,
        )

    @property
    def state(self) -> wire.EngineState:
        """Of the engine, as far as known."""
        return judge(self.signs)[0]

    @property
    def reason(self) -> str:
        """Why, where the state is not "ready"."""
        return judge(self.signs)[1]

    @property
    def model(self) -> wire.Model | None:
        """The served model; None before the engine is ready."""
        return None if self.ready is None else self.ready.model

    @property
    def open_generations(self) -> int:
        """Generations that have not ended."""
        return len(self._requests)

    async def wait_ready(self, deadline_s: float) -> wire.Ready:
        """Wait until the engine takes requests.

        Raises:
            EngineDead: it ended instead.
            EngineTimeout: `deadline_s` passed.
        """
        return await self._link.wait_ready(deadline_s)

    async def inspect(self, deadline_s: float) -> wire.Inspection:
        """Have the core check its invariants now.

        Raises:
            EngineDead: the engine is gone, or lost before it answered.
            EngineTimeout: `deadline_s` passed.
        """
        self._count += 1
        seq = self._count
        answer: asyncio.Future[wire.Inspection] = self._loop.create_future()
        self._inspections[seq] = answer
        try:
            self._link.send(wire.Inspect(seq))
            return await asyncio.wait_for(answer, deadline_s)
        except TimeoutError as error:
            raise EngineTimeout("the inspection of the engine core", deadline_s) from error
        finally:
            del self._inspections[seq]

    def drain(self) -> None:
        """Ask the core, and any that follows, to take nothing new; only the frontend that owns the core may.

        Raises:
            EngineDead: the engine is gone.
            Backpressure: the core does not read.
        """
        self._draining = True
        if self.lost is None:
            self._link.send(wire.Drain())

    def cut(self, fatal: wire.Fatal) -> None:
        """The owner of the core knows that it is lost, or (final) that all is over."""
        self._link.cut(fatal)

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

        While a core is being replaced the request waits here for the next one.

        Args:
            prompt_ids: ids of the prompt.
            params: sampling and stopping.
            request_id: unique among this client's open requests, 1 to 128 characters; None: made here.
            priority: smaller is more urgent.
            cache_salt: requests share cached prefixes only with requests of the same salt.

        Raises:
            EngineDead: the engine is gone.
            RequestRejected: an id does not fit, the request id is no such text or in use, or the core does not read.
                What the core itself finds wrong is raised when the generation is read.
        """
        self._count += 1
        name = request_id if request_id is not None else f"{self._prefix}-{self._count:x}"
        if not 1 <= len(name) <= wire.MAX_REQUEST_ID:
            # The core does not read it, so it could not answer either.
            limits = f"request_id: 1 to {wire.MAX_REQUEST_ID} characters, given {len(name)}"
            raise RequestRejected("invalid", limits, "request_id", wire.MAX_REQUEST_ID, len(name))
        if name in self._requests:
            raise RequestRejected("duplicate_id", f"request_id: {name!r} is in use", field="request_id")
        try:
            prompt = pack_ids(prompt_ids)
        except OverflowError as error:
            raise RequestRejected("invalid", "prompt: a token id does not fit 32 bits", field="prompt") from error
        if params.seed is None and not params.greedy:
            params = msgspec.structs.replace(params, seed=self._draw_seed())
        stream = Stream(
            wire.Submit(name, prompt, params, priority, cache_salt), self._loop, self._max_backlog_bytes, self._abort
        )
        if self.lost is None:
            self._requests.add(stream)
        else:
            self._requests.park(stream)
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
        stop: str | Sequence[str] = (),
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
            stop: a text, or several, that end the answer where they first appear; none may be empty.
            include_stop: whether the text that ended it belongs to the answer.
            skip_special: leave special tokens out of the text.
            request_id, priority, cache_salt: as in `submit`.

        Raises:
            RequestRejected: a stop string is empty; else as in `submit`.
            EngineDead: as in `submit`.
            TextOverload: too many texts wait to be encoded.
            TokenizerError, ModelFolderError: as in `tokenizer`.
        """
        if self.fatal is not None:
            raise EngineDead(self.fatal.message, self.fatal.code)
        stop = [stop] if isinstance(stop, str) else stop
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
        await self._link.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _abort(self, request_id: str) -> None:
        self._requests.abort(request_id, told=self.lost is None and self.fatal is None)

    def _handle(self, message: wire.CoreToClient) -> None:
        match message:
            case wire.Outputs():
                self._requests.feed(message)
            case wire.Status():
                self.status, self._engine = message, (message.state, message.reason)
                self.recoveries.note(message)
            case wire.Rejected():
                self._requests.reject(message)
            case _:
                self._handle_rare(message)

    def _handle_rare(self, message: wire.CoreToClient) -> None:
        match message:
            case wire.Inspection():
                waiting = self._inspections.get(message.seq)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case wire.Progress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case _:
                raise MalformedFrame(f"unexpected {type(message).__name__}")

    def _on_ready(self, _: wire.Ready) -> None:
        """A core, or a core's next executor, is ready; a new core is given all that is open."""
        self._engine = ("ready", "")
        if not self._was_lost:
            return
        self._was_lost = False
        self.recoveries.reconnected(self._requests.resubmit())
        if self._draining:
            with contextlib.suppress(Backpressure, EngineDead):
                self._link.send(wire.Drain())

    def _on_lost(self, fatal: wire.Fatal) -> None:
        self._was_lost = True
        self.recoveries.core_lost()
        self._requests.forget_unsent()
        self._fail_inspections(fatal)

    def _ended(self, fatal: wire.Fatal) -> None:
        self._requests.fail_all(fatal)
        self._fail_inspections(fatal)

    def _fail_inspections(self, fatal: wire.Fatal) -> None:
        for waiting in self._inspections.values():
            if not waiting.done():
                waiting.set_exception(EngineDead(fatal.message, fatal.code))
