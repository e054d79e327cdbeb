"""What the scripted CHAIN of the end-to-end tests says."""

from __future__ import annotations

from tests.fixtures.bbpe import END, END_TURN, TOOL
from tests.fixtures.chain import Chain, Piece

# The chat template ends in a line feed, so this follows every chat prompt.
CHAT: tuple[Piece, ...] = ("\n", "Hello", " there", b" \xf0\x9f", b"\x98\x80", ",", " friend", "!", END_TURN)
CHAT_TEXT = "Hello there \U0001f600, friend!"
# After a prompt that ends in "0": characters that line splitters cut at, and half a character at each border.
LINES: tuple[Piece, ...] = (
    *("0", "A", "\r", b"B\xe2", b"\x80\xa8", b"C\xe2\x80", b"\xa9D", "\u0085", b"\x00", "E", END),
)
LINES_TEXT = "A\rB\u2028C\u2029D\u0085\x00E"
# After "1": stop strings that begin and end inside tokens.
STOPS: tuple[Piece, ...] = ("1", "ABC", "DEF", "G", "HI", "J", "K", END)
STOPS_TEXT = "ABCDEFGHIJK"
# After "2": a special token in the middle.
SPECIAL: tuple[Piece, ...] = ("2", "x1", TOOL, "y1", "<|start|>")

CHAIN = Chain(scripts=(CHAT, LINES, STOPS, SPECIAL))


def alphabet(last: str, count: int) -> str:
    """What follows a letter: `count` letters of the alphabet, round and round."""
    return "".join(chr((ord(last) - ord("a") + step) % 26 + ord("a")) for step in range(1, count + 1))
