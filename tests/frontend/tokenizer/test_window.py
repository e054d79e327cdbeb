"""Decoding over a window of tokens."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from frontend.tokenizer.hf import DecodingRule, HfTokenizer
from frontend.tokenizer.window import MAX_WAITING, WindowDecoder
from tests.frontend.tokenizer.folders import decoded

WORDS = ["[UNK]", "hello", "##ing", "world", ",", "un", "##do", "a", "##b", "."]


def word_piece() -> HfTokenizer:
    """A tokenizer whose decoder is not followed by this package."""
    library = tokenizers.Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}))
    library.decoder = decoders.WordPiece(cleanup=False)
    assert DecodingRule.of(library).kind == "window"
    return HfTokenizer(library, {}, "made here")


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=30))
def test_joined_pieces_are_the_decoded_text(ids: list[int]) -> None:
    tokenizer = word_piece()
    assert decoded(tokenizer, ids) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=12), st.lists(st.integers(0, len(WORDS) - 1), max_size=12))
def test_prompt_and_answer_decode_as_one(prompt: list[int], answer: list[int]) -> None:
    tokenizer = word_piece()
    assert tokenizer.decode(prompt) + decoded(tokenizer, answer, prompt) == tokenizer.decode(prompt + answer)


def test_a_cut_character_waits_but_not_for_ever() -> None:
    data = "\u00e9".encode()
    decoder = WindowDecoder(lambda ids: bytes(ids).decode(errors="replace"), list(b"ab"))
    assert [decoder.push(byte) for byte in (*data, ord("c"))] == ["", "\u00e9", "c"]
    stuck = WindowDecoder(lambda ids: bytes(ids).decode(errors="replace"), [])
    assert "".join(stuck.push(0xFF) for _ in range(MAX_WAITING)) == "\ufffd" * MAX_WAITING


def test_the_end_gives_what_waited() -> None:
    decoder = WindowDecoder(lambda ids: bytes(ids).decode(errors="replace"), [])
    assert decoder.push(0xC3) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""
