"""Figures as a table of text."""

from __future__ import annotations

from collections.abc import Sequence


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest entry; the first is flush left, the others flush right."""
    lines = [list(titles), *([str(entry) for entry in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            entry.rjust(width) if place else entry.ljust(width)
            for place, (entry, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
