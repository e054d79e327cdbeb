"""Literals of special tokens in messages."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from frontend.tokenizer.base import Rendered
from frontend.tokenizer.shield import Shield

LITERALS = ["<|end|>", "<|start|>", "</s>"]


def shield() -> Shield:
    """A shield with words that can be told apart."""
    numbers = count(10**11)
    return Shield(LITERALS, lambda: str(next(numbers)))


def test_literals_are_replaced_and_come_back() -> None:
    one = shield()
    covered = one.cover("a<|end|>b</s>")
    assert "<" not in covered
    assert one.uncover(f"<|start|>{covered}<|end|>") == Rendered("<|start|>a<|end|>b</s><|end|>", ((10, 17), (18, 22)))


def test_text_without_literals_is_not_touched() -> None:
    one = shield()
    value = {"a": ["x < y", 1, None, {"b": "|end|>"}]}
    assert one.cover(value) == value
    assert one.uncover("x < y<|end|>") == Rendered("x < y<|end|>")


def test_a_literal_cut_over_two_texts_does_not_come_together() -> None:
    one = shield()
    covered = "".join(one.cover(["<|e", "nd|>"]))
    rendered = one.uncover(covered)
    assert rendered == Rendered("<|end|>", ((0, 3),))


def test_keys_are_covered() -> None:
    one = shield()
    (key,) = one.cover({"</s>": 1})
    assert key.isdigit()
    assert one.uncover(key) == Rendered("</s>", ((0, 4),))


def test_text_that_the_template_drops_leaves_nothing() -> None:
    one = shield()
    one.cover("</s>")
    assert one.uncover("hi") == Rendered("hi")


@given(st.lists(st.sampled_from([*LITERALS, "<", "<|", "a", "|>", "\n", "1"]), max_size=12))
def test_every_literal_ends_up_in_a_plain_span(parts: list[str]) -> None:
    text, one = "".join(parts), shield()
    rendered = one.uncover(one.cover(text))
    assert rendered.text == text
    bare = list(text)
    for start, end in rendered.plain:
        bare[start:end] = "\0" * (end - start)
    assert not any(literal in "".join(bare) for literal in LITERALS)
