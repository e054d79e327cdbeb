"""Decoding of byte-level BPE: every token is a string of bytes, and the text is their UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final

from frontend.tokenizer.base import REPLACEMENT

# Bytes before the end that decide what is incomplete at the end: a character has at most four.
TAIL_BYTES: Final = 4
WHOLE_REPLACEMENT: Final = REPLACEMENT.encode()


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of the alphabet in which byte-level vocabularies are spelled (GPT-2).

    Bytes that print in Latin-1 stand for themselves; the others, in order, are U+0100 and up.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printing)
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class ByteTable(dict[int, bytes]):
    """Token id -> its bytes, filled as ids are asked for; b"" for what has no text.

    Args:
        piece: the spelling of a token in the vocabulary; None when there is no such token.
        skipped: ids without text.
    """

    def __init__(self, piece: Callable[[int], str | None], skipped: frozenset[int]) -> None:
        super().__init__()
        self._piece = piece
        self._skipped = skipped
        self._alphabet = byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        piece = None if token_id in self._skipped else self._piece(token_id)
        if piece is None:
            return b""
        self[token_id] = data = self._spell(piece)
        return data

    def _spell(self, piece: str) -> bytes:
        # Added tokens are spelled as they are; one that fits the alphabet is read in it all the same, as the
        # library's decoder does.
        values = [self._alphabet.get(character) for character in piece]
        return piece.encode() if None in values else bytes(value for value in values if value is not None)


class ByteLevelDecoder:
    """TextDecoder over a ByteTable.

    Invariant: the UTF-8 decoder holds `_begun`, an incomplete character of at most three bytes. `_owed` says that some
    of them are the prompt's: a U+FFFD that they turn into is then the prompt's too, and not given.
    """

    def __init__(self, table: ByteTable, prompt_ids: Sequence[int]) -> None:
        self.late = 0
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(_tail(table, prompt_ids))
        self._begun = self._utf8.getstate()[0]
        self._owed = bool(self._begun)

    def push(self, token_id: int) -> str:
        """The characters that this token completed, after a U+FFFD for a character that it cut."""
        data = self._table[token_id]
        text = self._utf8.decode(data)
        self.late = 0
        if self._begun and text:
            self.late = int(text[0] == REPLACEMENT and not (self._begun + data).startswith(WHOLE_REPLACEMENT))
            text = self._settled(text)
        self._begun = self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        """A cut character gives one U+FFFD."""
        self.late = 0
        return self._settled(self._utf8.decode(b"", final=True))

    def _settled(self, text: str) -> str:
        if self._owed and text:
            self._owed = False
            self.late = 0
            return text.removeprefix(REPLACEMENT)
        return text


def _tail(table: ByteTable, token_ids: Sequence[int]) -> bytes:
    tail = b""
    for token_id in reversed(token_ids):
        if len(tail) >= TAIL_BYTES:
            break
        tail = table[token_id] + tail
    return tail[-TAIL_BYTES:]
