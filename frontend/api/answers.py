"""Answers of the OpenAI endpoints. A field that is UNSET is left out; None is null."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Finish = Literal["stop", "length"]


class CachedDetails(Struct, frozen=True):
    """How many prompt tokens came out of the prefix cache."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of one request; each prompt counts once however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails


class CompletionLogprobs(Struct, frozen=True):
    """Log-probabilities of a completion, one entry a token.

    Attributes:
        tokens: text of each token; one that is no valid UTF-8 alone is spelled "bytes:\\xe2\\x80".
        token_logprobs: of the token that was chosen.
        top_logprobs: the likeliest tokens and the chosen one; of two tokens with one spelling the likelier is kept.
        text_offset: where the token begins in the text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """A completion, whole or one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class TopLogprob(Struct, frozen=True):
    """One likely token: text, log-probability and UTF-8 bytes (which may be a part of a character)."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    """One token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Log-probabilities of a chat answer."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One whole answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A chat answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    """What a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """A chunk of a chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
