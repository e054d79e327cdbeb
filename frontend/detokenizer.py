"""Tokens of an answer to text, with the tokens that each piece of text stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.stop_strings import StopScanner
from frontend.tokenizer.base import TextDecoder


@dataclass(slots=True)
class TokenPiece:
    """A token and the text that it made certain, which begins at character `offset` of the answer."""

    token_id: int
    text: str
    offset: int


class Detokenizer:
    """The text of one answer, cut at the first stop string.

    Args:
        decoder: of the tokenizer, for the answer's prompt.
        stop: stop strings; none is empty.
        include_stop: whether the stop string is part of the text.
        min_tokens: stop strings are looked for from this token on (counted from 1).

    Attributes:
        count: tokens pushed.
        stop: the stop string that ended the text; no token may be pushed then.
    """

    def __init__(
        self, decoder: TextDecoder, *, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self.count = 0
        self.stop: str | None = None
        self._decoder = decoder
        self._scanner = StopScanner(stop, include=include_stop)
        self._min_tokens = min_tokens
        self._length = 0
        self._released = 0
        self._ready: list[str] = []
        self._waiting: list[TokenPiece] = []
        # Waiting tokens before this index have no text.
        self._blank = 0
        self._ended = False

    def push(self, token_id: int, *, hidden: bool = False) -> None:
        """Add a token; a hidden one counts but has no text."""
        self.count += 1
        text = "" if hidden else self._decoder.push(token_id)
        late = 0 if hidden else self._decoder.late
        if late:
            self._append_to_last(text[:late])
        self._waiting.append(TokenPiece(token_id, text[late:], self._length))
        self._length += len(text) - late
        self._scan(text)

    def finish(self) -> None:
        """The answer has ended: nothing is held back any more."""
        if self.stop is not None or self._ended:
            return
        text = self._decoder.finish()
        self._append_to_last(text)
        self._scan(text)
        if self.stop is None:
            self._ended = True
            self._release(self._scanner.flush())

    def take(self) -> tuple[str, list[TokenPiece]]:
        """The text that became certain since the last call, and the tokens that it begins, each once.

        Tokens without text come with the next one that has some; after a stop string those behind the last
        returned character do not come at all.
        """
        text = "".join(self._ready)
        self._ready.clear()
        count = len(self._waiting) if self._ended else self._releasable()
        tokens, self._waiting = self._waiting[:count], self._waiting[count:]
        self._blank = max(self._blank - count, 0)
        return text, tokens

    def _scan(self, text: str) -> None:
        if not text:
            return
        if self.count < self._min_tokens:
            self._release(text)
            return
        self._release(self._scanner.push(text))
        self.stop = self._scanner.match

    def _release(self, text: str) -> None:
        if text:
            self._ready.append(text)
            self._released += len(text)

    def _append_to_last(self, text: str) -> None:
        if not text:
            return
        # A token that has text may have been given already.
        if self._waiting and not self._waiting[-1].text:
            last = self._waiting[-1]
            last.text, last.offset = text, self._length
            self._blank = min(self._blank, len(self._waiting) - 1)
        self._length += len(text)

    def _releasable(self) -> int:
        count = 0
        for index in range(self._blank, len(self._waiting)):
            token = self._waiting[index]
            if token.text:
                if token.offset >= self._released:
                    break
                count = index + 1
            elif index == self._blank:
                self._blank += 1
        return count
