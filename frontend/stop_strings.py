"""Finds stop strings in text that comes in pieces, and holds back only what may still become one.

The match that ends first wins, and of those that end together the longest, so that the answer does not depend on where
the pieces are cut. Each stop string is followed by the automaton of Knuth, Morris and Pratt ("Fast pattern matching
in strings", 1977); its table grows only as far as the text has matched, so that a long stop string costs nothing ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Matcher:
    """One stop string. Invariant: `matched` is the longest prefix of it, short of all, that the text ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        # shorter[k]: the longest proper prefix of pattern[:k] that it also ends with.
        self._shorter = [0, 0]

    def feed(self, text: str) -> int:
        """Take more text; the index behind the first match, or -1."""
        pattern, matched, index = self.pattern, self.matched, 0
        while index < len(text):
            if matched == 0:
                index = text.find(pattern[0], index)
                if index < 0:
                    break
            character = text[index]
            while matched and pattern[matched] != character:
                matched = self._shorter[matched]
            if pattern[matched] == character:
                matched += 1
            index += 1
            if matched == len(pattern):
                return index
            if matched == len(self._shorter):
                self._extend(matched)
        self.matched = matched
        return -1

    def _extend(self, length: int) -> None:
        pattern, border = self.pattern, self._shorter[length - 1]
        while border and pattern[border] != pattern[length - 1]:
            border = self._shorter[border]
        self._shorter.append(border + 1 if pattern[border] == pattern[length - 1] else 0)


class StopScanner:
    """Follows a text and ends it at a stop string.

    Args:
        stops: the stop strings; none is empty.
        include: whether the stop string is part of the text.

    Attributes:
        match: the stop string that ended the text, None so far. No more text is taken then.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "a stop string is not empty"
        self.match: str | None = None
        self._include = include
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held: deque[str] = deque()
        self._held_length = 0

    def push(self, text: str) -> str:
        """Take more text; gives what is certain to stay."""
        assert self.match is None
        if not self._matchers:
            return text
        self._hold(text)
        ends = [(end, -len(found.pattern), found.pattern) for found in self._matchers if (end := found.feed(text)) >= 0]
        if not ends:
            return self._release(self._held_length - max(matcher.matched for matcher in self._matchers))
        end, _, self.match = min(ends)
        stays = self._held_length - len(text) + end
        return self._release(stays if self._include else stays - len(self.match))

    def flush(self) -> str:
        """The text has ended: what was held stays."""
        return self._release(self._held_length)

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)
            self._held_length += len(text)

    def _release(self, length: int) -> str:
        out: list[str] = []
        self._held_length -= length
        while length > 0:
            first = self._held.popleft()
            if len(first) > length:
                self._held.appendleft(first[length:])
                first = first[:length]
            out.append(first)
            length -= len(first)
        return "".join(out)
