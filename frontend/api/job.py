"""The answers of one request: submitted together, read as one stream, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from engine_core.wire.client import Model, TokenLogprobs
from frontend.api.answers import CachedDetails, Finish, Usage
from frontend.api.validate import Wishes, fitted, nth
from frontend.client import AsyncClient
from frontend.errors import BacklogExceeded, FrontendError, GenerationFailed
from frontend.generation import Delta, TextGeneration
from frontend.metrics import Metrics, RequestClock
from frontend.tokenizer.base import Tokenizer

# Deltas that may wait for the response to take them; what is beyond stays in the client, which has a limit in bytes.
QUEUED_DELTAS = 64


@dataclass
class Choice:
    """One answer as it grows.

    Attributes:
        index: among all answers of the request: prompt * n + number.
        prompt: number of its prompt.
        prompt_ids: of that prompt.
        answer: the generation.
        fresh: nothing was given yet.
        finish: why it ended; None while it runs.
        stop_reason: the stop string or token that ended it.
        completion_tokens: generated so far.
        cached_tokens: prompt tokens that came out of the prefix cache.
    """

    index: int
    prompt: int
    prompt_ids: Sequence[int]
    answer: TextGeneration
    fresh: bool = True
    finish: Finish | None = None
    stop_reason: int | str | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Collected:
    """One whole answer.

    Attributes:
        choice: it belongs to.
        texts: pieces of its text.
        token_ids: of its tokens; offsets: where the text of each begins, in characters.
        logprobs: one for each token, when asked for.
    """

    choice: Choice
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Take what a delta brought."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.offsets.extend(delta.offsets)
        self.logprobs.extend(delta.logprobs or ())


class Job:
    """All answers of one request.

    Args:
        client: where to submit.
        model: the served model.
        tokenizer: for the text.
        metrics: counters.
        wishes: of the request.
        prompts: token ids of each prompt, checked.
        name: of the request; the engine's request ids are made from it.
    """

    def __init__(
        self,
        client: AsyncClient,
        model: Model,
        tokenizer: Tokenizer,
        metrics: Metrics,
        wishes: Wishes,
        prompts: Sequence[Sequence[int]],
        name: str,
    ) -> None:
        self.choices: list[Choice] = []
        self._metrics = metrics
        self._prompts = prompts
        self._wishes = wishes
        self._clock = RequestClock(metrics)
        self._counted = False
        try:
            for number, ids in enumerate(prompts):
                self._submit(client, model, tokenizer, number, ids, name)
        except FrontendError:
            self.abort()
            raise

    def _submit(
        self, client: AsyncClient, model: Model, tokenizer: Tokenizer, number: int, ids: Sequence[int], name: str
    ) -> None:
        wishes = self._wishes
        params = fitted(wishes.params, len(ids), model)
        self._metrics.prompt_size.observe(len(ids))
        self._metrics.params_max_tokens.observe(params.max_tokens or 0)
        for child in range(wishes.n):
            index = number * wishes.n + child
            own = nth(params, child)
            generation = client.submit(
                ids, own, request_id=f"{name}-{index}", priority=wishes.priority, cache_salt=wishes.cache_salt
            )
            answer = TextGeneration(
                generation,
                tokenizer,
                ids,
                own,
                stop=wishes.stop,
                include_stop=wishes.include_stop,
                skip_special=wishes.skip_special,
            )
            self.choices.append(Choice(index, number, ids, answer))

    async def deltas(self) -> AsyncGenerator[tuple[Choice, Delta]]:
        """What the answers give, in the order it comes; ends when all have ended.

        Raises:
            RequestRejected: the core refused one.
            GenerationError: one failed; the others are aborted.
        """
        if len(self.choices) == 1:
            # The common case without a layer between.
            choice = self.choices[0]
            async for delta in choice.answer:
                self._note(choice, delta)
                yield choice, delta
                choice.fresh = False
            return
        async for choice, delta in self._merged():
            self._note(choice, delta)
            yield choice, delta
            choice.fresh = False

    async def _merged(self) -> AsyncIterator[tuple[Choice, Delta]]:
        queue: asyncio.Queue[tuple[Choice, Delta] | FrontendError | None] = asyncio.Queue(QUEUED_DELTAS)
        pumps = [asyncio.create_task(_pump(choice, queue)) for choice in self.choices]
        try:
            left = len(pumps)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, FrontendError):
                    raise item
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _note(self, choice: Choice, delta: Delta) -> None:
        if delta.finish == "error" or delta.finish == "abort":
            raise GenerationFailed("the engine ended this request before its time")
        self._clock.tokens(choice.index, delta.completion_tokens - choice.completion_tokens)
        choice.completion_tokens = delta.completion_tokens
        choice.cached_tokens = max(choice.cached_tokens, delta.cached_tokens)
        if delta.finish is not None:
            choice.finish = delta.finish
            choice.stop_reason = delta.stop_reason
            self._metrics.answer_ended(delta.times, choice.completion_tokens)

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = sum(map(len, self._prompts))
        completion = sum(choice.completion_tokens for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[:: self._wishes.n])
        return Usage(prompt, completion, prompt + completion, CachedDetails(cached))

    @property
    def overflow(self) -> BacklogExceeded | None:
        """That an answer was ended because nobody read it, known before anybody does."""
        errors = (choice.answer.error for choice in self.choices)
        return next((error for error in errors if isinstance(error, BacklogExceeded)), None)

    def abort(self) -> None:
        """End what still runs; whoever reads it gets nothing more."""
        for choice in self.choices:
            choice.answer.abort()

    def end(self, reason: str | None = None) -> float:
        """Count the request once and abort what still runs.

        Args:
            reason: "abort" or "error"; None: the answers ended by themselves.

        Returns:
            Seconds since the submission.
        """
        self.abort()
        if reason is None:
            reason = "length" if any(choice.finish == "length" for choice in self.choices) else "stop"
        self._metrics.params_n.observe(self._wishes.n)
        if reason in ("stop", "length") or self._clock.first_token_s is not None:
            usage = self.usage()
            self._metrics.prompt_tokens.inc(usage.prompt_tokens)
            self._metrics.prompt_tokens_cached.inc(usage.prompt_tokens_details.cached_tokens)
        return self._clock.end(reason)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the submission to the first token."""
        return self._clock.first_token_s


async def _pump(choice: Choice, queue: asyncio.Queue[tuple[Choice, Delta] | FrontendError | None]) -> None:
    try:
        async for delta in choice.answer:
            await queue.put((choice, delta))
        await queue.put(None)
    except FrontendError as error:
        await queue.put(error)
