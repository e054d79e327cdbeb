"""Log lines, the same in all processes: one line a record, for people or as JSON for programs.

A record may carry facts of its own: `logger.info(text, extra={"facts": {"tokens": 5}})`. Whatever a message holds, it
stays on its line, and a terminal that shows it obeys none of it.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final, Literal

import msgspec

LogFormat = Literal["text", "json"]
Process = Literal["frontend", "core", "executor"]

FRAMES: Final = 12


class LineFormatter(logging.Formatter):
    """Makes one line of a record.

    Args:
        process: whose lines these are.
        form: "text" or "json".
        values: whether what an unexpected error says is shown; it may quote a request.
    """

    def __init__(self, process: Process, form: LogFormat, *, values: bool) -> None:
        super().__init__()
        self._process = process
        self._form = form
        self._values = values

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        given: Mapping[str, Any] = getattr(record, "facts", {})
        facts = {name: plain(value) if isinstance(value, str) else value for name, value in given.items()}
        message = plain(record.getMessage())
        error = self._error(record)
        at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
        if self._form == "json":
            fixed = {"time": at, "level": record.levelname, "process": self._process, "pid": record.process}
            fixed |= {"logger": record.name, "message": message} | ({"error": error} if error else {})
            return msgspec.json.encode({**facts, **fixed}, enc_hook=str).decode()
        told = "".join(f" {name}={_word(str(value))}" for name, value in facts.items())
        tail = f" | {error}" if error else ""
        return f"{at} {record.levelname} {self._process} {record.name} {message}{told}{tail}"

    def _error(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        return plain(" <- ".join(self._links(error)))

    def _links(self, error: BaseException | None) -> Iterator[str]:
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
            places = " > ".join(f"{PurePath(each.filename).name}:{each.lineno} {each.name}" for each in frames)
            said = f": {error}" if self._values and str(error) else ""
            yield f"{type(error).__name__}{said}" + (f" at {places}" if places else "")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _word(text: str) -> str:
    """The text as one word: quoted as JSON where it has blanks or quotes, or is empty."""
    return msgspec.json.encode(text).decode() if not text or set(text) & set(" \"'=") else text


def plain(text: str) -> str:
    """The text with every control character, line end and half of a character spelled out."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def log_lines(process: Process, form: LogFormat, *, values: bool = True) -> None:
    """Send all records from INFO on to stderr; a second call takes the place of the first.

    Args:
        process, form, values: as in LineFormatter.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process, form, values=values))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
