"""Log-probabilities in the two shapes of the OpenAI endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine_core.wire.client import TokenLogprobs
from frontend.api.answers import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from frontend.tokenizer.base import Tokenizer

# JSON has no infinity.
LOWEST: Final = -9999.0


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], offsets: Sequence[int], entries: Sequence[TokenLogprobs]
) -> CompletionLogprobs:
    """The shape of completions.

    Args:
        tokenizer: spells the tokens.
        token_ids: that were chosen.
        offsets: where the text of each begins, in characters.
        entries: one for each.
    """
    return CompletionLogprobs(
        tokens=[spelled(tokenizer, token) for token in token_ids],
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[_top(tokenizer, token, entry) for token, entry in zip(token_ids, entries, strict=True)],
        text_offset=list(offsets),
    )


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The shape of chat answers; arguments as above."""
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        top = [
            TopLogprob(tokenizer.token_text(other), _finite(logprob), list(tokenizer.token_bytes(other)))
            for other, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        content.append(
            ChatLogprob(tokenizer.token_text(token), _finite(entry.logprob), list(tokenizer.token_bytes(token)), top)
        )
    return ChatLogprobs(content)


def _top(tokenizer: Tokenizer, chosen: int, entry: TokenLogprobs) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in [*zip(entry.top_ids, entry.top_logprobs, strict=True), (chosen, entry.logprob)]:
        found.setdefault(spelled(tokenizer, token), _finite(logprob))
    return found


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token, or its bytes spelled out where they are no whole characters."""
    raw = tokenizer.token_bytes(token)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return tokenizer.token_text(token)


def _finite(logprob: float) -> float:
    # Written so that NaN is the lowest too.
    return logprob if logprob > LOWEST else LOWEST
