"""One answer: the stream of tokens of a request, and the text it makes."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from engine_core.wire.client import FinishReason, Output, RequestTimes, Submit, TokenLogprobs
from engine_core.wire.codec import pack_ids
from engine_core.wire.sampling import SamplingParams
from frontend.detokenizer import Detokenizer
from frontend.errors import BacklogExceeded, FrontendError, GenerationFailed
from frontend.tokenizer.base import Tokenizer

# What a waiting Output costs in memory, near enough for a cap.
OUTPUT_BYTES: Final = 200
TOKEN_BYTES: Final = 32
LOGPROB_BYTES: Final = 64


class Stream:
    """What the client keeps of an open request; Generation is its handle.

    Attributes:
        submit: the request, as sent.
        received: all tokens that came.
        sent: whether a core has been given the request.
        ended: no Output will be added.
    """

    def __init__(
        self, submit: Submit, loop: asyncio.AbstractEventLoop, max_backlog_bytes: int, on_abort: Callable[[str], None]
    ) -> None:
        self.submit = submit
        self.received = array("i")
        self.sent = False
        self.ended = False
        self.loop = loop
        self._max_backlog_bytes = max_backlog_bytes
        self._on_abort = on_abort
        self._waiting: list[Output] = []
        self._waiting_bytes = 0
        self._error: FrontendError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._cached_tokens = 0
        self._continued = False
        self._began = loop.time()
        self._first: tuple[float, RequestTimes] | None = None

    def resumed(self) -> Submit:
        """The submission that continues this request on another core: the tokens that came count as generated."""
        self._continued |= bool(self.received)
        output, earlier = pack_ids(self.received), self._earlier()
        return msgspec.structs.replace(self.submit, output=output, resumed=self.sent, earlier=earlier)

    def _earlier(self) -> RequestTimes:
        """Where the request's seconds went until now."""
        if self._first is None:
            return RequestTimes(self.loop.time() - self._began, 0.0, 0.0, 0)
        at, times = self._first
        return msgspec.structs.replace(times, decode=self.loop.time() - at)

    def feed(self, output: Output) -> None:
        """Add an Output; too much that nobody read aborts the request."""
        if self.ended:
            return
        if not self._continued:
            self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        elif output.cached_tokens != self._cached_tokens:
            # What the first core found cached counts, not what a later one did when it computed all anew.
            output = msgspec.structs.replace(output, cached_tokens=self._cached_tokens)
        if output.times is not None and not self.received:
            self._first = self.loop.time(), output.times
        self.received.extend(output.token_ids)
        self._waiting.append(output)
        self._waiting_bytes += _cost(output)
        self.ended = output.finish is not None
        if self._waiting_bytes > self._max_backlog_bytes and not self.ended:
            error = BacklogExceeded(self._waiting_bytes, self._max_backlog_bytes)
            self.abort()
            self.fail(error)
        self._wake()

    def fail(self, error: FrontendError) -> None:
        """End with an error, which takes the place of what was not read."""
        self.ended = True
        self._error = error
        self._waiting.clear()
        self._waiting_bytes = 0
        self._wake()

    def abort(self) -> None:
        """End the request; nothing happens when it has ended."""
        if self.ended:
            return
        self._on_abort(self.submit.request_id)
        self.ended = True
        self._waiting.append(Output(self.submit.request_id, [], finish="abort"))
        self._wake()

    @property
    def error(self) -> FrontendError | None:
        """Why the request failed, known before it is read."""
        return self._error

    async def next(self) -> Output:
        """All that came since the last call, as one Output.

        Raises:
            StopAsyncIteration: the last Output was read.
            FrontendError: the request failed.
        """
        assert self._reader is None, "a generation has one reader"
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._reader = self.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        waiting, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        return waiting[0] if len(waiting) == 1 else _merged(waiting)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Generation:
    """An open request: an async iterator of Output, each with all tokens since the one before.

    Leaving it (aclose, `async with`, or dropping the last reference) aborts the request. Iterating raises
    RequestRejected, EngineDead, GenerationFailed or BacklogExceeded; a cancelled `anext` loses nothing.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def request_id(self) -> str:
        """The id the request was submitted with."""
        return self._stream.submit.request_id

    @property
    def error(self) -> FrontendError | None:
        """What the next read raises, when the request has failed."""
        return self._stream.error

    def abort(self) -> None:
        """End the request now; at any moment, as often as you like. What was not read is followed by "abort"."""
        self._stream.abort()

    def resumed(self) -> Submit:
        """The submission that continues this request on another core: the tokens that came count as generated."""
        return self._stream.resumed()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Output:
        output = await self._stream.next()
        if output.finish == "error":
            raise GenerationFailed(output.error or "the engine gave the request up")
        return output

    async def aclose(self) -> None:
        """Abort the request if it still runs."""
        self.abort()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def __del__(self) -> None:
        if not self._stream.ended:
            # Any thread may collect garbage; a closed loop has no requests any more.
            with contextlib.suppress(RuntimeError):
                self._stream.loop.call_soon_threadsafe(self._stream.abort)


class Delta(Struct, frozen=True):
    """A piece of an answer.

    Attributes:
        text: new text; empty only on the last Delta.
        token_ids: tokens whose text is part of the answer now; a token is listed when its first character is.
        offsets: where in the answer's text that of each of them begins, in characters.
        logprobs: one per token, if asked for.
        finish: set on the last Delta.
        stop_reason: the stop string, or the id out of stop_token_ids, that ended the answer.
        completion_tokens: generated so far, up to and with the token that completed a stop string.
        cached_tokens: prompt tokens that came out of the prefix cache, as far as known.
        times: on the last Delta, unless a stop string ended the answer.
    """

    text: str
    token_ids: list[int]
    offsets: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: FinishReason | None
    stop_reason: str | int | None
    completion_tokens: int
    cached_tokens: int
    times: RequestTimes | None


class TextGeneration:
    """The text of a generation: an async iterator of Delta.

    The answer does not depend on how the tokens came in Outputs. A stop string cuts the text at its first
    character and aborts the request; the token lists then end with the token that holds the last returned character.
    Raises what Generation raises.

    Args:
        generation: the open request.
        tokenizer: of its model.
        prompt_ids: its prompt.
        params: as submitted.
        stop: texts that end the answer where they first appear; none may be empty. None of them counts before
            `params.min_tokens` tokens.
        include_stop: whether what ended the answer (stop string, or stop token) is part of the text.
        skip_special: leave special tokens out of the text.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._generation = generation
        self._params = params
        self._include_stop = include_stop
        self._text = Detokenizer(
            tokenizer.decoder(prompt_ids, skip_special=skip_special),
            stop=stop,
            include_stop=include_stop,
            min_tokens=params.min_tokens,
        )
        self._logprobs: list[TokenLogprobs] = []
        self._cached_tokens = 0
        self._done = False

    @property
    def request_id(self) -> str:
        """The id the request was submitted with."""
        return self._generation.request_id

    @property
    def error(self) -> FrontendError | None:
        """What the next read raises, when the request has failed."""
        return self._generation.error

    def abort(self) -> None:
        """End the request now; the next Delta is the last, with finish "abort"."""
        self._generation.abort()

    def __aiter__(self) -> TextGeneration:
        return self

    async def __anext__(self) -> Delta:
        while not self._done:
            delta = self._digest(await self._generation.__anext__())
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request if it still runs."""
        self._generation.abort()

    async def __aenter__(self) -> TextGeneration:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._generation.abort()

    def _digest(self, output: Output) -> Delta | None:
        text = self._text
        hidden = len(output.token_ids) - 1 if output.stop_token_id is not None and not self._include_stop else -1
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        if output.logprobs is not None:
            self._logprobs.extend(output.logprobs)
        for index, token_id in enumerate(output.token_ids):
            text.push(token_id, hidden=index == hidden)
            if text.stop is not None:
                break
        if output.finish is not None:
            text.finish()
        if text.stop is not None:
            self._generation.abort()
            return self._last("stop", text.stop, None)
        if output.finish is not None:
            wanted = output.stop_token_id in self._params.stop_token_ids
            return self._last(output.finish, output.stop_token_id if wanted else None, output.times)
        return self._delta(None, None, None)

    def _last(self, finish: FinishReason, stop_reason: str | int | None, times: RequestTimes | None) -> Delta:
        self._done = True
        delta = self._delta(finish, stop_reason, times)
        assert delta is not None
        return delta

    def _delta(self, finish: FinishReason | None, reason: str | int | None, times: RequestTimes | None) -> Delta | None:
        released, tokens = self._text.take()
        if not released and finish is None:
            return None
        logprobs = None
        if self._params.logprobs is not None:
            logprobs, self._logprobs = self._logprobs[: len(tokens)], self._logprobs[len(tokens) :]
        return Delta(
            text=released,
            token_ids=[token.token_id for token in tokens],
            offsets=[token.offset for token in tokens],
            logprobs=logprobs,
            finish=finish,
            stop_reason=reason,
            completion_tokens=self._text.count,
            cached_tokens=self._cached_tokens,
            times=times,
        )


def _cost(output: Output) -> int:
    entries = sum(1 + len(entry.top_ids) for entry in output.logprobs or ())
    return OUTPUT_BYTES + TOKEN_BYTES * len(output.token_ids) + LOGPROB_BYTES * entries


def _merged(outputs: list[Output]) -> Output:
    last = outputs[-1]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return Output(
        request_id=last.request_id,
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        finish=last.finish,
        stop_token_id=last.stop_token_id,
        logprobs=logprobs or None,
        cached_tokens=max(output.cached_tokens for output in outputs),
        times=last.times,
        error=last.error,
    )
