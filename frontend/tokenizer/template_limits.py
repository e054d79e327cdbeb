"""What a rendering may spend, and operations of templates whose result would be huge."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

MAX_STEPS: Final = 1_000_000
MAX_CPU_S: Final = 1.0
MAX_CHARACTERS: Final = 64 * 2**20
MAX_POWER_BITS: Final = 4096
STEPS_PER_CLOCK: Final = 256
# A width or precision of "%": behind its sign, a key in parentheses, flags or the point, and before a conversion.
WIDTH: Final = re.compile(r"[%) #.+-](\d+)(?=\.?\d*[hlL]?[a-zA-Z])")
# One of eight digits or more.
WIDE: Final = re.compile(r"\d{8}")


class LimitPassed(Exception):
    """Rendering passed a limit; the message names it."""


class Budget:
    """What one rendering may spend.

    Args:
        clock: processor seconds of this thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock() + MAX_CPU_S
        self._steps = 0

    def step(self) -> None:
        """Count a step.

        Raises:
            LimitPassed: too many, or too long.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise LimitPassed(f"the chat template took more than {MAX_STEPS} steps")
        if self._steps % STEPS_PER_CLOCK == 0 and self._clock() > self._end:
            raise LimitPassed(f"the chat template took longer than {MAX_CPU_S:g} s")


def check_size(size: int, limit: int = MAX_CHARACTERS, unit: str = "characters") -> None:
    """Refuse a size over its limit.

    Raises:
        LimitPassed: it is over.
    """
    if size > limit:
        raise LimitPassed(f"the chat template made more than {limit} {unit}")


def check_operation(operator: str, left: object, right: object) -> None:
    """Refuse an operation with a huge result.

    Raises:
        LimitPassed: it would be huge.
    """
    if operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(count, int):
                check_size(len(value) * count)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        check_size(left.bit_length() * max(right, 0), MAX_POWER_BITS, "bits in one number")
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        check_size(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))


def check_text_call(name: str, text: str, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuse a method of a text, or a filter on one, with a huge result.

    Args:
        name: of the method or filter.
        text: it works on.
        given, named: arguments.

    Raises:
        LimitPassed: it would be huge.
    """
    values = [*given, *named.values()]
    if name == "replace":
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) >= 2:
            check_size(len(text) + text.count(texts[0]) * len(texts[1]))
    elif name == "join":
        check_join(text, values[0] if values else ())
    elif name == "format":
        _check_format(text, values)
    else:
        # All other numbers are widths: of the text, of each tab in it, of what stands before each line.
        times = 1 + text.count("\t" if name == "expandtabs" else "\n")
        widths = [len(value) if isinstance(value, str) else value for value in values if isinstance(value, str | int)]
        check_size(max(widths, default=0) * times)


def check_join(separator: str, parts: object) -> None:
    """Refuse a join with a huge result.

    Raises:
        LimitPassed: it would be huge.
    """
    if isinstance(parts, list | tuple | dict):
        check_size(sum(len(part) if isinstance(part, str) else 1 for part in parts) + len(separator) * len(parts))


def check_width(field: str) -> None:
    """Refuse a formatted field that is huge.

    Args:
        field: its width and precision as digits, and what stands beside them.

    Raises:
        LimitPassed: it would be huge.
    """
    if WIDE.search(field):
        raise LimitPassed("the chat template formats a text wider than 10000000 characters")


def _check_format(form: str, values: Sequence[Any]) -> None:
    widths: list[str] = WIDTH.findall(form)
    for width in widths:
        check_width(width)
    check_size(sum(map(int, widths)))
    if "*" in form:
        # Widths that come out of the arguments.
        check_size(sum(value for value in values if isinstance(value, int)))
    fields = 1 + form.count("%") + form.count("{")
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    check_size(len(form) + fields * longest)
