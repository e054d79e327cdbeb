"""Decoding with a library's own decode over a window of tokens, for vocabularies whose rules are not followed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from frontend.tokenizer.base import REPLACEMENT

# Tokens of context in front of the window, and tokens that may wait for the rest of a character.
CONTEXT: Final = 6
MAX_WAITING: Final = 16


class WindowDecoder:
    """TextDecoder over decode(ids) of a library.

    A token's text is what decode of the window gives more with it than without it. That is exact for vocabularies
    whose tokens look back at most CONTEXT tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]) -> None:
        self.late = 0
        self._decode = decode
        self._ids = list(prompt_ids[-CONTEXT:])
        self._given = decode(self._ids)
        self._waiting = 0

    def push(self, token_id: int) -> str:
        """The text since the last whole character; "" while the window ends inside one."""
        self._ids.append(token_id)
        self._waiting += 1
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and self._waiting < MAX_WAITING:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """What waited for the rest of a character."""
        return self._advance(self._decode(self._ids)) if self._waiting else ""

    def _advance(self, text: str) -> str:
        given, self._waiting = self._given.rstrip(REPLACEMENT), 0
        new = text[len(given) :]
        del self._ids[:-CONTEXT]
        self._given = self._decode(self._ids)
        return new
