"""Prompts with an exact number of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.prompts import Shape, as_text, conversation_requests, digest, random_requests
from frontend.tokenizer.load import load_tokenizer
from tests.fixtures.chain import Chain, write_chain


def test_random_prompts_have_the_length_and_differ() -> None:
    made = random_requests(Shape(input_len=20, output_len=7, vocab=300), 50, seed=1)
    assert {(len(one.prompt), one.input_len, one.output_len) for one in made} == {(20, 20, 7)}
    assert len({tuple(one.prompt) for one in made}) == 50
    assert all(100 <= token < 300 for one in made for token in one.prompt if isinstance(token, int))


def test_lengths_spread_around_the_middle() -> None:
    made = random_requests(Shape(input_len=100, output_len=50, range_ratio=0.5), 300, seed=1)
    assert {min(one.input_len for one in made) >= 50, max(one.input_len for one in made) <= 150} == {True}
    assert max(one.output_len for one in made) > 60
    assert min(one.output_len for one in made) < 40


def test_a_prefix_is_common_to_all() -> None:
    made = random_requests(Shape(input_len=4, prefix_len=10), 5, seed=1)
    assert len({tuple(one.prompt[:10]) for one in made}) == 1
    assert len({tuple(one.prompt[10:]) for one in made}) == 5


def test_equal_requests_have_one_digest() -> None:
    one, same, other = (random_requests(Shape(), 3, seed) for seed in (1, 1, 2))
    assert digest(one) == digest(same) != digest(other)


@pytest.mark.parametrize(
    ("shape", "flag"),
    [
        (Shape(input_len=0), "--random-input-len"),
        (Shape(output_len=0), "--random-output-len"),
        (Shape(vocab=0), "--vocab"),
        (Shape(prefix_len=-1), "--random-prefix-len"),
        (Shape(range_ratio=1.0), "--random-range-ratio"),
    ],
)
def test_sizes_that_make_no_request_are_refused_by_name(shape: Shape, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        shape.check()


def test_a_text_is_read_as_exactly_as_many_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chain(tmp_path / "model", Chain()))
    for request in random_requests(Shape(input_len=9, vocab=126), 5, seed=1):
        text = as_text(request, tokenizer)
        assert isinstance(text.prompt, str)
        assert len(tokenizer.encode(text.prompt)) == 9


def conversations(folder: Path, *pairs: tuple[str, ...]) -> Path:
    """A file of conversations."""
    path = folder / "conversations.json"
    path.write_text(
        json.dumps([{"id": "x", "conversations": [{"from": "human", "value": turn} for turn in one]} for one in pairs])
    )
    return path


def test_conversations_give_prompts_and_lengths_of_answers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chain(tmp_path / "model", Chain()))
    path = conversations(tmp_path, ("abcdef", "abcde"), ("abcdef",), ("ab", "abcdef"), ("uvwxyz", "uvwx", "u"))
    made = conversation_requests(path, 10, 1, tokenizer, None)
    assert {(one.prompt, one.input_len, one.output_len) for one in made} == {("abcdef", 6, 5), ("uvwxyz", 6, 4)}
    assert [one.output_len for one in conversation_requests(path, 1, 1, tokenizer, 9)] == [9]


def test_without_a_tokenizer_the_length_must_be_given(tmp_path: Path) -> None:
    path = conversations(tmp_path, ("ab", "cd"))
    made = conversation_requests(path, 10, 1, None, 5)
    assert [(one.prompt, one.input_len, one.output_len) for one in made] == [("ab", 0, 5)]
    with pytest.raises(UsageError, match="--sharegpt-output-len"):
        conversation_requests(path, 10, 1, None, None)


@pytest.mark.parametrize("content", ["{", "[]", '[{"conversations": 3}]'])
def test_a_file_without_conversations_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="--dataset-path"):
        conversation_requests(path, 1, 1, None, 5)
