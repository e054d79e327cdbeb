"""From a job to the client: one JSON object, or events; and the log and counters of how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from starlette.responses import Response

from frontend.api import sse
from frontend.api.answers import Usage
from frontend.api.errors import describe
from frontend.api.exchange import Exchange
from frontend.api.job import Choice, Collected, Job
from frontend.api.service import Service, new_id
from frontend.api.validate import Wishes
from frontend.errors import BacklogExceeded, ClientGone, FrontendError, RequestError
from frontend.generation import Delta
from frontend.metrics import Metrics
from frontend.tokenizer.base import Tokenizer

logger = logging.getLogger(__name__)

# How long the status line of a stream waits for the core to refuse the request or give a token.
DECIDE_S: Final = 0.5


class Shape(ABC):
    """How one endpoint spells answers.

    Args:
        service: for names and the clock.
        tokenizer: spells tokens.
        wishes: of the request.
        prefix: of the answer's id.

    Attributes:
        name: id of the answer.
    """

    def __init__(self, service: Service, tokenizer: Tokenizer, wishes: Wishes, prefix: str) -> None:
        self.name = new_id(prefix)
        self._tokenizer = tokenizer
        self._wishes = wishes
        self._created = int(service.wall_clock())
        self._model = service.names[0]

    @abstractmethod
    def chunks(self, choice: Choice, delta: Delta) -> Sequence[Struct]:
        """What a delta adds, as chunks."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Struct:
        """The last chunk, which counts tokens."""

    @abstractmethod
    def whole(self, answers: Sequence[Collected], usage: Usage) -> Struct:
        """The answer to a request without stream."""


class Reply:
    """Answers one request.

    Args:
        exchange: with the client.
        job: the answers.
        shape: of the endpoint.
        headers: of the response.
        metrics: counters.
    """

    def __init__(self, exchange: Exchange, job: Job, shape: Shape, headers: dict[str, str], metrics: Metrics) -> None:
        self._exchange = exchange
        self._job = job
        self._shape = shape
        self._headers = headers
        self._metrics = metrics
        self._finished = False

    async def whole(self) -> Response:
        """The answer as one JSON object.

        Raises:
            FrontendError: it failed, or was cut.
        """
        answers = [Collected(choice) for choice in self._job.choices]
        async with self._counted():
            async for choice, delta in self._job.deltas():
                answers[choice.index].add(delta)
        body = msgspec.json.encode(self._shape.whole(answers, self._job.usage()))
        return Response(body, headers=self._headers, media_type="application/json")

    async def events(self, writer: sse.EventWriter, *, include_usage: bool) -> None:
        """The answer as events.

        Raises:
            FrontendError: it failed, or was cut.
        """
        async with self._counted(), contextlib.aclosing(self._job.deltas()) as deltas:
            part = await self._first(deltas, writer)
            if not writer.started:
                await writer.start(self._headers)
            if part is not None:
                await writer.write(self._spelled(*part))
            async for choice, delta in deltas:
                await writer.write(self._spelled(choice, delta))
        tail = sse.event(self._shape.usage_chunk(self._job.usage())) if include_usage else b""
        await writer.end(tail + sse.DONE)

    async def _first(
        self, deltas: AsyncIterator[tuple[Choice, Delta]], writer: sse.EventWriter
    ) -> tuple[Choice, Delta] | None:
        """What comes first; the status line goes out before it where that takes longer than DECIDE_S."""
        first = asyncio.ensure_future(anext(deltas, None))
        try:
            await asyncio.wait({first}, timeout=DECIDE_S)
            if not first.done():
                await writer.start(self._headers)
            return await first
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    def _spelled(self, choice: Choice, delta: Delta) -> bytes:
        chunks = self._shape.chunks(choice, delta)
        return sse.event(chunks[0]) if len(chunks) == 1 else b"".join(map(sse.event, chunks))

    def check_backlog(self) -> None:
        """Cut the answer when its client reads too little. The answer's own task may wait for that very client."""
        error = self._job.overflow
        if error is not None and not self._finished:
            self._exchange.cut(error)

    def note_backlog(self, error: BacklogExceeded) -> None:
        """Count and tell that the answer was cut."""
        self._metrics.connection_cut("backlog")
        logger.warning("%s: %s (--max-stream-backlog-bytes)", self._exchange.ticket.request_id, error)

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        reason: str | None = "error"
        try:
            yield
            reason = None
        except (ClientGone, BacklogExceeded, asyncio.CancelledError):
            reason = "abort"
            raise
        except RequestError:
            # The core refused it: it was never a request of the engine's.
            reason = "rejected"
            raise
        finally:
            self._finish(reason)

    def _finish(self, reason: str | None) -> None:
        self._finished = True
        if reason == "rejected":
            self._job.abort()
            return
        self._job.end(reason)
        usage, cut = self._job.usage(), self._exchange.cut_reason
        facts: dict[str, object] = {"answer": self._shape.name, "answers": len(self._job.choices)}
        facts |= {"finish": reason or ",".join(sorted({choice.finish or "" for choice in self._job.choices}))}
        facts |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        facts |= {"cached_tokens": usage.prompt_tokens_details.cached_tokens}
        if self._job.first_token_s is not None:
            facts["first_token_s"] = round(self._job.first_token_s, 4)
        if cut is not None:
            facts["why"] = str(cut)
        self._exchange.ticket.facts |= facts


async def stream(exchange: Exchange, reply: Reply, writer: sse.EventWriter, *, include_usage: bool) -> None:
    """Send a reply as events; after the first byte errors are events too.

    Raises:
        FrontendError: it failed before the first byte.
    """
    attendant = asyncio.create_task(
        writer.attend(lambda: exchange.cut(ClientGone("the client does not read")), reply.check_backlog)
    )
    try:
        await exchange.guard(reply.events(writer, include_usage=include_usage))
    except ClientGone:
        await _leave(exchange, writer)
    except FrontendError as error:
        if isinstance(error, BacklogExceeded):
            reply.note_backlog(error)
        if not writer.started:
            raise
        await _end_with(error, exchange, writer)
    finally:
        attendant.cancel()
        await asyncio.gather(attendant, return_exceptions=True)


async def _end_with(error: FrontendError, exchange: Exchange, writer: sse.EventWriter) -> None:
    try:
        await exchange.guard(writer.end(sse.event(describe(error)[1])))
    except FrontendError:
        await exchange.drop()


async def _leave(exchange: Exchange, writer: sse.EventWriter) -> None:
    await exchange.drop()
    if not writer.started:
        raise ClientGone("the client left")
