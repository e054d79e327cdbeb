"""Decoding of text pieces with byte fallback: a character outside the vocabulary is a run of byte tokens.

Two libraries read such runs differently where they are no UTF-8, and strip leading spaces differently:

- tokenizers: a run that is not valid as a whole becomes one U+FFFD for each byte. So a run is given when it has ended;
  a run longer than MAX_RUN_BYTES that is valid so far is given up to there, to keep long foreign text streaming.
- sentencepiece: characters are read one by one; a byte that begins none becomes one U+FFFD.

Both decoders here follow their library, with one exception: a character that is cut by the end of the answer gives one
U+FFFD in all, not one for each byte, and leaves the characters before it whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, Literal

from frontend.tokenizer.base import REPLACEMENT

MAX_RUN_BYTES: Final = 64

# A token's text, its byte, or nothing.
Piece = str | int | None


# How the spaces at the start of a text are treated: kept; the one that the tokenizer put there dropped; all dropped.
LeadingSpaces = Literal["none", "one", "all"]


class Verbatim(str):
    """A piece that keeps a space at its start, wherever it stands."""


class PieceTable(dict[int, Piece]):
    """Token id -> Piece, filled as ids are asked for.

    Args:
        piece: computes an entry.
        skipped: ids without text.
        blank: their entry: None, or "" if they end a run of bytes.
    """

    def __init__(self, piece: Callable[[int], Piece], skipped: frozenset[int], *, blank: Piece = None) -> None:
        super().__init__()
        self._piece = piece
        self._skipped = skipped
        self._blank = blank

    def __missing__(self, token_id: int) -> Piece:
        piece = self._blank if token_id in self._skipped else self._piece(token_id)
        if piece is not None:
            self[token_id] = piece
        return piece


def byte_value(piece: str) -> int | None:
    """The byte that a piece such as "<0x0A>" stands for; None for every other piece."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


class WholeRunDecoder:
    """TextDecoder in the manner of tokenizers' Replace, ByteFallback, Fuse, Strip.

    Args:
        table: the pieces, with spaces as they print.
        prompt_ids: the prompt.
        strip: spaces at the start of the whole text that are dropped.

    Invariant: `_run` is the part of the current run of bytes that was not given; its first `_foreign` bytes are the
    prompt's. `_broken`: a part of the run was no UTF-8, so that each byte of it is a U+FFFD.
    """

    def __init__(self, table: PieceTable, prompt_ids: Sequence[int], *, strip: int) -> None:
        self.late = 0
        self._table = table
        self._strip = strip
        for token_id in prompt_ids:
            if self._strip == 0:
                break
            piece = table[token_id]
            if piece is not None:
                self._stripped(piece if isinstance(piece, str) else chr(piece))
        self._run = bytearray(_ending_run(table, prompt_ids))
        self._broken = _decodable(self._run) is None
        whole = _decodable(self._run)
        if whole is not None:
            del self._run[: len(whole.encode())]
        self._foreign = len(self._run)

    def push(self, token_id: int) -> str:
        """The text of a piece, after that of the run it ends; "" for a byte."""
        piece = self._table[token_id]
        self.late = 0
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return self._stripped(self._overflow()) if len(self._run) > MAX_RUN_BYTES else ""
        run = self._stripped(self._end_run()) if self._run or self._broken else ""
        self.late = len(run)
        return run + self._stripped(piece)

    def finish(self) -> str:
        """The rest of the run; a cut character gives one U+FFFD."""
        self.late = 0
        whole = None if self._broken else _decodable(self._run)
        if whole is None:
            return self._stripped(self._end_run())
        cut = len(self._run) > len(whole.encode()) and (whole != "" or self._foreign == 0)
        self._run.clear()
        return self._stripped(whole + REPLACEMENT * cut)

    def _end_run(self) -> str:
        run, own = bytes(self._run), len(self._run) - self._foreign
        broken, self._broken, self._foreign = self._broken, False, 0
        self._run.clear()
        if not broken:
            try:
                return run.decode()
            except UnicodeDecodeError:
                pass
        return REPLACEMENT * own

    def _overflow(self) -> str:
        whole = None if self._broken else _decodable(self._run)
        if whole is None:
            own = len(self._run) - self._foreign
            self._broken, self._foreign = True, 0
            self._run.clear()
            return REPLACEMENT * own
        del self._run[: len(whole.encode())]
        self._foreign = 0
        return whole

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class RunDecoder:
    """TextDecoder in the manner of sentencepiece.

    Args:
        table: the pieces, with spaces as they print.
        prompt_ids: the prompt.
        strip: which spaces at the start of the whole text are dropped.

    Invariant: `_run` is the beginning of a character, at most three bytes; `_owed`: some of them are the prompt's.
    """

    def __init__(self, table: PieceTable, prompt_ids: Sequence[int], *, strip: LeadingSpaces) -> None:
        self.late = 0
        self._table = table
        self._strip_all = strip == "all"
        self._at_start = strip != "none"
        self._run = bytearray()
        self._owed = False
        for token_id in prompt_ids:
            if not self._at_start:
                break
            self.push(token_id)
        self._run = bytearray()
        for value in _ending_run(table, prompt_ids):
            self._run.append(value)
            self._complete()
        self._owed = bool(self._run)

    def push(self, token_id: int) -> str:
        """The text of a piece, after what was left of a run of bytes, or the character that a byte completed."""
        piece = self._table[token_id]
        self.late = 0
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._at_start = False
            begun = len(self._run)
            self._run.append(piece)
            text = self._complete()
            # Replacement characters of the bytes before; the last character may be this byte's own.
            self.late = min(begun, text.count(REPLACEMENT)) if begun and text.startswith(REPLACEMENT) else 0
            return text
        text = self._rest() if self._run else ""
        self.late = len(text)
        return text + (self._lead(piece) if self._at_start else piece)

    def finish(self) -> str:
        """A cut character gives one U+FFFD."""
        if self._run and _decodable(self._run) is not None:
            self._run.clear()
            return "" if self._owed else REPLACEMENT
        return self._rest()

    def _lead(self, piece: str) -> str:
        if not piece:
            return piece
        self._at_start = self._strip_all and piece == " "
        return piece if isinstance(piece, Verbatim) else piece.removeprefix(" ")

    def _complete(self) -> str:
        out = ""
        while self._run and len(self._run) >= (need := _length(self._run[0])):
            out += self._take(need)
        return out

    def _rest(self) -> str:
        out = ""
        while self._run:
            out += self._take(_length(self._run[0]))
        return out

    def _take(self, need: int) -> str:
        try:
            character = self._run[:need].decode() if len(self._run) >= need else REPLACEMENT
        except UnicodeDecodeError:
            character = REPLACEMENT
        if character == REPLACEMENT and self._run[:need] != b"\xef\xbf\xbd":
            need = 1
        del self._run[:need]
        owed, self._owed = self._owed, False
        return "" if owed and character == REPLACEMENT else character


def _length(lead: int) -> int:
    """Bytes of the UTF-8 character that begins with this byte; 1 for a byte that begins none."""
    if lead < 0xC0:
        return 1
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4 if lead < 0xF8 else 1


def _decodable(data: bytes | bytearray) -> str | None:
    """The whole characters of the data, if nothing but a cut character is left over; else None."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        return decoder.decode(bytes(data))
    except UnicodeDecodeError:
        return None


def _ending_run(table: PieceTable, token_ids: Sequence[int]) -> bytes:
    run = bytearray()
    for token_id in reversed(token_ids):
        piece = table[token_id]
        if isinstance(piece, str) or len(run) >= MAX_RUN_BYTES:
            break
        if piece is not None:
            run.append(piece)
    return bytes(reversed(run))
