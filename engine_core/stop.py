"""When a request ends by its own tokens: end-of-sequence ids, stop ids, length."""

from __future__ import annotations

from collections.abc import Iterable

from engine_core.wire.client import FinishReason
from engine_core.wire.sampling import SamplingParams


class StopRules:
    """The end of one request, decided token by token. Stop strings are not known here.

    Args:
        params: of the request.
        eos_token_ids: of the model.
        prompt_len: tokens of the prompt.
        room: tokens that the sequence may hold in all, prompt and output.

    Attributes:
        max_total: tokens at which the sequence ends; no later token is ever computed.
    """

    __slots__ = ("_min_total", "_stop_ids", "max_total")

    def __init__(self, params: SamplingParams, eos_token_ids: Iterable[int], *, prompt_len: int, room: int) -> None:
        wanted = room if params.max_tokens is None else prompt_len + params.max_tokens
        self.max_total = min(wanted, room)
        self._min_total = prompt_len + params.min_tokens
        own = frozenset(params.stop_token_ids)
        self._stop_ids = own if params.ignore_eos else own.union(eos_token_ids)

    def verdict(self, token: int, total: int) -> FinishReason | None:
        """Whether the sequence ends with `token`, its `total`-th token counting from 1.

        A stop token at the last possible position counts as "stop". One that comes before min_tokens ends nothing;
        the executor does not sample such.
        """
        if token in self._stop_ids and total >= self._min_total:
            return "stop"
        return "length" if total >= self.max_total else None
