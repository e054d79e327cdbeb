"""Literals of special tokens in messages."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from frontend.tokenizer.base import Rendered
from frontend.tokenizer.shield import Shield

LITERALS = ["<|end|>", "<|start|>", "</s>"]


KEY = "483920175566"


def shield() -> Shield:
    """A shield with a key that texts here do not have."""
    return Shield(LITERALS, KEY)


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


def test_digits_beside_a_word_stay() -> None:
    one = shield()
    covered = one.cover("12</s>34<|end|>")
    assert one.uncover(covered) == Rendered("12</s>34<|end|>", ((2, 6), (8, 15)))


def test_what_only_looks_like_a_word_stays() -> None:
    one = shield()
    covered = one.cover("</s>")
    assert one.uncover(f"{KEY}99999999 {covered} {KEY}12") == Rendered(f"{KEY}99999999 </s> {KEY}12", ((21, 25),))


def test_many_literals_take_time_in_proportion() -> None:
    """Of 300,000 literals each is looked for once: with a search for each of them this takes hours."""
    one, count = shield(), 300_000
    began = time.monotonic()
    rendered = one.uncover(one.cover("<|end|>" * count))
    assert time.monotonic() - began < 30
    assert len(rendered.plain) == count
    assert rendered.text == "<|end|>" * count


@given(st.lists(st.sampled_from([*LITERALS, "<", "<|", "a", "|>", "\n", "1"]), max_size=12))
def test_every_literal_ends_up_in_a_plain_span(parts: list[str]) -> None:
    text, one = "".join(parts), shield()
    rendered = one.uncover(one.cover(text))
    assert rendered.text == text
    bare = list(text)
    for start, end in rendered.plain:
        bare[start:end] = "\0" * (end - start)
    assert not any(literal in "".join(bare) for literal in LITERALS)
