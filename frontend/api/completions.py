"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from engine_core.wire.client import Model
from frontend.api import schema, validate
from frontend.api.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from frontend.api.endpoint import Endpoint
from frontend.api.job import Choice, Collected
from frontend.api.logprobs import completion_logprobs
from frontend.api.reply import Shape
from frontend.api.schema import CompletionRequest
from frontend.api.service import Service
from frontend.api.texts import Texts
from frontend.generation import Delta

PARAM: Final = "prompt"


class Completions(Endpoint):
    """Texts that continue prompts."""

    def __init__(self, service: Service, texts: Texts) -> None:
        super().__init__(service, texts, CompletionRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange, body = await self.begin(scope, receive, send)
        ignored = self.fields.ignored(body)
        request = schema.parse(body, CompletionRequest)
        validate.check_model(request.model, self.service.names)
        wishes = validate.completion_wishes(request)
        prompts = schema.prompts(request.prompt)
        validate.check_counts(len(prompts), wishes.n)
        _, model = self.service.ready_client()
        validate.check_ids(wishes, model)
        add_special = request.add_special_tokens is not False
        ids = await exchange.guard(self._ids(prompts, model, add_special))
        shape = CompletionShape(self.service, self.texts.tokenizer, wishes, "cmpl")
        await self.answer(exchange, wishes, ids, shape, ignored)

    async def _ids(self, prompts: list[str] | list[list[int]], model: Model, add_special: bool) -> list[list[int]]:
        found: list[list[int]] = []
        encode = partial(self.texts.encode, add_special=add_special, room=model.max_model_len)
        for prompt in prompts:
            ids = await encode(prompt) if isinstance(prompt, str) else prompt
            validate.check_prompt(ids, model, PARAM)
            found.append(ids)
        return found


class CompletionShape(Shape):
    """How completions look."""

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            id=self.name,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=UNSET if usage is None else usage,
        )

    def chunks(self, choice: Choice, delta: Delta) -> Sequence[Completion]:
        """One chunk for each delta."""
        logprobs = None
        if delta.logprobs is not None:
            logprobs = completion_logprobs(self._tokenizer, delta.token_ids, delta.offsets, delta.logprobs)
        return [self._completion([self._choice(choice, delta.text, delta.token_ids, logprobs, first=choice.fresh)])]

    def usage_chunk(self, usage: Usage) -> Completion:
        """A chunk without choices."""
        return self._completion([], usage)

    def whole(self, answers: Sequence[Collected], usage: Usage) -> Completion:
        """All texts."""
        choices = []
        for answer in answers:
            logprobs = (
                completion_logprobs(self._tokenizer, answer.token_ids, answer.offsets, answer.logprobs)
                if self._wishes.params.logprobs is not None
                else None
            )
            choices.append(self._choice(answer.choice, "".join(answer.texts), answer.token_ids, logprobs, first=True))
        return self._completion(choices, usage)

    def _choice(
        self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: CompletionLogprobs | None, *, first: bool
    ) -> CompletionChoice:
        ids = self._wishes.token_ids
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason=choice.finish,
            stop_reason=UNSET if choice.stop_reason is None else choice.stop_reason,
            token_ids=list(token_ids) if ids else UNSET,
            prompt_token_ids=list(choice.prompt_ids) if ids and first else UNSET,
        )
