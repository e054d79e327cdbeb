"""Keeps the literals of special tokens that stand in messages from becoming control tokens.

Before rendering, each such literal is replaced by a word of digits, which templates pass on as they pass on any word.
After rendering the words turn back, and their places are known to be plain text. Messages without such literals are not
touched, so that the prompt is what the template makes of them.

All words of a rendering begin with the same random digits, and equal literals have the same word: the words are found
in one pass over the text, however many there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from frontend.tokenizer.base import Rendered
from frontend.tokenizer.special import literal_pattern

# Of the number behind the random digits.
NUMBER_DIGITS: Final = 8


class Shield:
    """One rendering's words and what they stand for.

    Args:
        literals: of the special tokens.
        key: random digits, nothing a user may know before.
    """

    def __init__(self, literals: Iterable[str], key: str) -> None:
        self._literals = tuple(literals)
        self._pattern = literal_pattern(self._literals)
        self._key = key
        self._words: dict[str, str] = {}
        self._stood_for: dict[str, str] = {}

    def cover(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        """The value with every literal in it replaced: in texts, in lists and objects, in keys.

        A beginning of a literal at the end of a text is replaced too: a template may put two texts side by side.
        """
        if isinstance(value, str):
            return self._cover_text(value)
        if isinstance(value, list):
            return [self.cover(item) for item in value]
        if isinstance(value, dict):
            return {self._pattern.sub(self._replace, key): self.cover(item) for key, item in value.items()}
        return value

    def uncover(self, text: str) -> Rendered:
        """The rendered text with its literals back, and where they are."""
        if not self._words:
            return Rendered(text)
        out: list[str] = []
        spans: list[tuple[int, int]] = []
        length = position = 0
        for match in re.finditer(f"{self._key}[0-9]{{{NUMBER_DIGITS}}}", text):
            literal = self._stood_for.get(match.group())
            if literal is None:
                continue
            before = text[position : match.start()]
            length += len(before)
            spans.append((length, length + len(literal)))
            length += len(literal)
            out += (before, literal)
            position = match.end()
        return Rendered("".join([*out, text[position:]]), tuple(spans))

    def _cover_text(self, text: str) -> str:
        covered = self._pattern.sub(self._replace, text)
        begun = self._begun(covered)
        return covered[: len(covered) - begun] + self._stand_in(covered[len(covered) - begun :]) if begun else covered

    def _begun(self, text: str) -> int:
        """Length of the longest end of the text with which a literal begins."""
        longest = max((len(literal) for literal in self._literals), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(literal.startswith(end) for literal in self._literals):
                return length
        return 0

    def _replace(self, match: re.Match[str]) -> str:
        return self._stand_in(match.group())

    def _stand_in(self, literal: str) -> str:
        word = self._words.get(literal)
        if word is None:
            word = self._words[literal] = f"{self._key}{len(self._words):0{NUMBER_DIGITS}d}"
            self._stood_for[word] = literal
        return word
