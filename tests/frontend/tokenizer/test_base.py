"""Text that is no valid Unicode."""

from __future__ import annotations

import pytest

from frontend.tokenizer.base import without_surrogates


@pytest.mark.parametrize(
    ("given", "clean"),
    [
        ("plain \u4f60", "plain \u4f60"),
        ("a\ud800b", "a\ufffdb"),
        ("a\udc00", "a\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ufeff\x00\ufffe", "\ufeff\x00\ufffe"),
    ],
)
def test_surrogates_are_joined_or_replaced(given: str, clean: str) -> None:
    assert without_surrogates(given) == clean
