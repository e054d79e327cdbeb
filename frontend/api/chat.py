"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from engine_core.wire.client import Model
from frontend.api import schema, validate
from frontend.api.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from frontend.api.endpoint import Endpoint
from frontend.api.job import Choice, Collected
from frontend.api.logprobs import chat_logprobs
from frontend.api.messages import template_kwargs, template_messages
from frontend.api.reply import Shape
from frontend.api.schema import ChatRequest
from frontend.api.service import Service
from frontend.api.texts import Texts
from frontend.generation import Delta

PARAM: Final = "messages"


class Chat(Endpoint):
    """Answers to conversations."""

    def __init__(self, service: Service, texts: Texts) -> None:
        super().__init__(service, texts, ChatRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange, body = await self.begin(scope, receive, send)
        ignored = self.fields.ignored(body)
        request = schema.parse(body, ChatRequest)
        validate.check_model(request.model, self.service.names)
        wishes = validate.chat_wishes(request)
        validate.check_counts(1, wishes.n)
        messages = template_messages(request.messages, continued=bool(request.continue_final_message))
        kwargs = template_kwargs(request.chat_template_kwargs)
        _, model = self.service.ready_client()
        validate.check_ids(wishes, model)
        ids = await exchange.guard(self._ids(request, messages, kwargs, model))
        shape = ChatShape(self.service, self.texts.tokenizer, wishes, "chatcmpl")
        await self.answer(exchange, wishes, [ids], shape, ignored)

    async def _ids(
        self, request: ChatRequest, messages: list[dict[str, object]], kwargs: dict[str, object], model: Model
    ) -> list[int]:
        continued = bool(request.continue_final_message)
        ids = await self.texts.chat(
            messages,
            room=model.max_model_len,
            add_generation_prompt=not continued and request.add_generation_prompt is not False,
            continue_final_message=continued,
            variables=kwargs,
        )
        validate.check_prompt(ids, model, PARAM)
        return ids


class ChatShape(Shape):
    """How chat answers look."""

    def chunks(self, choice: Choice, delta: Delta) -> Sequence[ChatChunk]:
        """The role once for each answer, then the texts."""
        opening = [self._opening(choice)] if choice.fresh else []
        logprobs: ChatLogprobs | None = None
        if delta.logprobs is not None:
            logprobs = chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs)
        part = ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(content=delta.text) if delta.text or choice.finish is None else ChatDelta(),
            logprobs=logprobs,
            finish_reason=choice.finish,
            stop_reason=UNSET if choice.stop_reason is None else choice.stop_reason,
            token_ids=list(delta.token_ids) if self._wishes.token_ids else UNSET,
        )
        return [*opening, self._chunk([part])]

    def _opening(self, choice: Choice) -> ChatChunk:
        part = ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content=""))
        return self._chunk([part], prompt_ids=choice.prompt_ids if self._wishes.token_ids else None)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ChatChunk:
        return ChatChunk(
            id=self.name,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=UNSET if usage is None else usage,
            prompt_token_ids=UNSET if prompt_ids is None else list(prompt_ids),
        )

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """A chunk without choices."""
        return self._chunk([], usage)

    def whole(self, answers: Sequence[Collected], usage: Usage) -> ChatCompletion:
        """All answers."""
        return ChatCompletion(
            id=self.name,
            created=self._created,
            model=self._model,
            choices=[self._whole_choice(answer) for answer in answers],
            usage=usage,
            prompt_token_ids=list(answers[0].choice.prompt_ids) if self._wishes.token_ids else UNSET,
        )

    def _whole_choice(self, answer: Collected) -> ChatChoice:
        choice = answer.choice
        assert choice.finish is not None
        told = self._wishes.params.logprobs is not None
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(content="".join(answer.texts)),
            logprobs=chat_logprobs(self._tokenizer, answer.token_ids, answer.logprobs) if told else None,
            finish_reason=choice.finish,
            stop_reason=UNSET if choice.stop_reason is None else choice.stop_reason,
            token_ids=answer.token_ids if self._wishes.token_ids else UNSET,
        )
