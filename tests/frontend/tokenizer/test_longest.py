"""The bound on a token's text: never passed, and not there where it could be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from frontend.tokenizer.base import TokenBound
from frontend.tokenizer.byte_level import byte_alphabet
from frontend.tokenizer.hf import HfTokenizer
from frontend.tokenizer.longest import NFC_SHRINKS, least_tokens
from tests.fixtures.bbpe import SPECIALS
from tests.frontend.tokenizer.folders import bbpe, llama, spm

BYTES = byte_alphabet()
SHRINKING = st.text(st.sampled_from("aé\u0301\u212a\u1fef\u2126\u1100\u1161\u11a8가\U0002f800 ")) | st.text()


def byte_level(change: Callable[[tokenizers.Tokenizer], object] | None = None, lacks: str = "") -> HfTokenizer:
    """A vocabulary of all bytes, less some, with a change."""
    vocab = {letter: value for letter, value in BYTES.items() if letter not in lacks} | {"hello": 300}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if change is not None:
        change(library)
    return HfTokenizer(library, {}, "here")


def normalized(*steps: normalizers.Normalizer) -> Callable[[tokenizers.Tokenizer], object]:
    """Puts normalizers in front."""

    def change(library: tokenizers.Tokenizer) -> None:
        library.normalizer = normalizers.Sequence(list(steps))

    return change


@given(st.text())
def test_no_text_has_fewer_tokens_than_the_bound_says(text: str) -> None:
    for tokenizer in (bbpe(), llama()):
        assert tokenizer.bound is not None
        assert least_tokens(tokenizer, text) <= len(tokenizer.encode(text, add_special=False))


@given(SHRINKING)
def test_nor_has_one_that_composition_makes_shorter(text: str) -> None:
    tokenizer = byte_level(normalized(normalizers.NFC()))
    assert tokenizer.bound == TokenBound(NFC_SHRINKS * len("hello"))
    assert least_tokens(tokenizer, text) <= len(tokenizer.encode(text))


def test_the_bound_is_the_longest_token() -> None:
    assert byte_level().bound == TokenBound(len("hello"))
    assert byte_level(lambda library: library.add_tokens(["\u6f22" * 4])).bound == TokenBound(12)
    assert bbpe().bound == TokenBound(max(map(len, SPECIALS)))
    assert least_tokens(byte_level(), "x" * 51) == 11
    assert least_tokens(byte_level(), "\ud800" * 50) == 10


LACKING = byte_level(lacks="".join(letter for letter, value in BYTES.items() if value in b"a\xef\x01"))


@given(st.text(st.sampled_from("abhello\x01\ufffd\uff21\ud800 ")) | st.text())
def test_bytes_that_the_vocabulary_lacks_count_for_nothing(text: str) -> None:
    assert LACKING.bound is not None
    assert set(LACKING.bound.lost) == set(b"a\xef\x01")
    assert least_tokens(LACKING, text) <= len(LACKING.encode(text))


def test_a_text_of_other_bytes_is_bounded_all_the_same() -> None:
    assert least_tokens(LACKING, "x" * 51) == 11
    assert least_tokens(LACKING, "a" * 51) == 0


def _split(library: tokenizers.Tokenizer) -> None:
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(normalized(normalizers.NFC()), lacks="a"),
        byte_level(normalized(normalizers.Replace("b", "aa")), lacks="a"),
        byte_level(normalized(normalizers.Strip())),
        byte_level(normalized(normalizers.NFKC())),
        byte_level(normalized(normalizers.Replace("aa", "a"))),
        byte_level(normalized(normalizers.Replace(tokenizers.Regex(" +"), "   "))),
        byte_level(lambda library: library.add_tokens([AddedToken("<x>", lstrip=True)])),
        byte_level(lambda library: library.add_special_tokens([AddedToken("<x>", rstrip=True)])),
        byte_level(_split),
        HfTokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "u": 1}, unk_token="u")), {}, "here"),
        HfTokenizer(tokenizers.Tokenizer(models.BPE({"a": 0, "u": 1}, [], unk_token="u", fuse_unk=True)), {}, "here"),
        spm(),
    ],
)
def test_where_text_may_vanish_nothing_is_said(tokenizer: HfTokenizer) -> None:
    assert tokenizer.bound is None
    assert least_tokens(tokenizer, "x" * 10**6) == 0
