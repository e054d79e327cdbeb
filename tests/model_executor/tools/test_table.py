from __future__ import annotations

import pytest

from model_executor.tools.table import megabytes, table


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table(("a", "long title"), [("wide cell", "x"), ("", "")]) == [
        "a          long title",
        "wide cell  x",
        "",
    ]
    assert table(("a",), []) == ["a"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB (1000 bytes)"),
        (1_500_000, "1.5 MB (1500000 bytes)"),
        (671_026_404_352, "671.0 GB (671026404352 bytes)"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert megabytes(size) == text
