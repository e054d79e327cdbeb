"""Module paths in a quantization configuration, moved with the blocks they name.

A path that names a cut block goes, one that names a remaining block gets its new index, all else is kept to the letter.
A pattern is kept as it is; it is refused where it would match other modules under the new indices than under the old.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from model_executor.errors import ConfigRefused
from model_executor.weights.cut_config import Edit

_PATH: Final = re.compile(r"((?:[A-Za-z_]\w*\.)*layers\.)([0-9]{1,9})((?:\..*)?)")
_PATTERN: Final = re.compile(r"re:|[\\*+?^$|()\[\]{}]|[-+]:")
_MARKS: Final = re.compile(r"\A([-+]:)?(re:)?")
_DIGIT: Final = re.compile(r"[0-9]")
_GONE: Final = object()


class QuantCut:
    """Moves the paths of one configuration.

    Args:
        modules: names of the modules of the remaining blocks, under their old indices.
        sources: the remaining blocks, ascending.
        depth: blocks of the source; a path at or above it names a prediction block.
        path: of the file, for errors.
        prediction: blocks behind the last one that are kept.
        apart: patterns of whole names of modules that stand in no block, however they are called.

    Attributes:
        edits: what changed.
    """

    def __init__(
        self,
        modules: Sequence[str],
        sources: Sequence[int],
        depth: int,
        path: Path,
        *,
        prediction: int = 0,
        apart: Sequence[str] = (),
    ) -> None:
        self.edits: list[Edit] = []
        self._apart = [re.compile(pattern) for pattern in apart]
        kept = [*sources, *range(depth, depth + prediction)]
        self._index = {source: index for index, source in enumerate(kept)}
        self._modules = [module for module in modules if self._new_name(module) != module]
        self._path = path

    def moved(self, value: object, field: str) -> object:
        """The value with its paths moved.

        Raises:
            ConfigRefused: a pattern that would mean something else.
        """
        if isinstance(value, dict):
            return self._moved_object(value, field)
        if isinstance(value, list):
            return self._moved_list(value, field)
        return value

    def _moved_object(self, value: dict[str, Any], field: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, inner in value.items():
            new = self._moved_text(key, f"{field}.{key}")
            if new is _GONE:
                self.edits.append(Edit(f"{field}.{key}", inner, None, "its block is cut"))
                continue
            assert isinstance(new, str)
            if new != key:
                self.edits.append(Edit(f"{field}.{key}", key, new, "its block has a new index"))
            made[new] = self.moved(inner, f"{field}.{key}")
        return made

    def _moved_list(self, value: list[Any], field: str) -> list[Any]:
        made = []
        for item in value:
            new = self._moved_text(item, field) if isinstance(item, str) else self.moved(item, field)
            if new is not _GONE:
                made.append(new)
        if made != value and all(isinstance(item, str) for item in value):
            self.edits.append(Edit(field, value, made, "paths of cut blocks are gone, others have new indices"))
        return made

    def _moved_text(self, text: str, field: str) -> object:
        if found := self._path_of_block(text):
            return self._new_name(text) if int(found[2]) in self._index else _GONE
        if _PATTERN.search(text) and _DIGIT.search(text):
            self._check(text, field)
        return text

    def _new_name(self, text: str) -> str:
        found = self._path_of_block(text)
        if not found or int(found[2]) not in self._index:
            return text
        return f"{found[1]}{self._index[int(found[2])]}{found[3]}"

    def _path_of_block(self, text: str) -> re.Match[str] | None:
        return None if any(pattern.fullmatch(text) for pattern in self._apart) else _PATH.fullmatch(text)

    def _check(self, text: str, field: str) -> None:
        """A pattern with a number in it: does it match the same modules?"""
        readings = _readings(text)
        if not readings:
            raise ConfigRefused(field, text, "no pattern that can be checked", self._path)
        for module in self._modules:
            new = self._new_name(module)
            if any(bool(reading(module)) != bool(reading(new)) for reading in readings):
                raise ConfigRefused(field, text, f"would treat {new} otherwise than {module} before", self._path)


def _readings(text: str) -> list[Callable[[str], object]]:
    """All ways in which tools may read a pattern: from the name's start, anywhere in it, as a pattern of file names."""
    made: list[Callable[[str], object]] = []
    body = _MARKS.sub("", text)
    with contextlib.suppress(re.error):
        pattern = re.compile(body)
        made += [pattern.match, pattern.search]
    if body == text:
        made.append(lambda name: fnmatch.fnmatchcase(name, text))
    return made
