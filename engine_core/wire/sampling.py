"""How the next token of one request is chosen and when the request ends."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class SamplingParams(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sampling and stopping of one request; limits are checked when a message is decoded.

    The order of treatment is that of the field's servers: temperature, then top-k, then top-p, then min-p,
    each on the float32 logits that the step before left.

    Attributes:
        temperature: 0 is greedy; values at or below 1e-4 are treated as greedy.
        top_k: keep the k most likely tokens; 0 and -1 keep all.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this; 0 is greedy, 1 keeps all.
        min_p: keep tokens at least this times as likely as the likeliest.
        seed: makes the request repeatable: the token at position p depends on (seed, p) and the logits alone.
            None: the core draws one at admission.
        max_tokens: tokens to generate at most; None, and anything larger than the room left in the model's length,
            means the room left.
        min_tokens: no end-of-sequence or stop token is sampled before this many tokens.
        stop_token_ids: end the request as an end-of-sequence token does.
        ignore_eos: the model's end-of-sequence tokens neither stop the request nor are banned by min_tokens.
        logprobs: None: none; k: for each token its own log-probability and those of the k likeliest
            (log-softmax of the model's raw logits).
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature <= 1e-4 or self.top_p == 0.0 or self.top_k == 1
