"""Byte fallback: equal to each library's decode, but for characters cut by the end."""

from __future__ import annotations

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from frontend.tokenizer.byte_runs import (
    MAX_RUN_BYTES,
    Piece,
    PieceTable,
    RunDecoder,
    Verbatim,
    WholeRunDecoder,
    byte_value,
)
from tests.fixtures.spm import FIRST_BYTE, trained_model
from tests.frontend.tokenizer.folders import decoded, llama, spm
from tests.frontend.tokenizer.llama_json import llama_tokenizer

SPM_LIBRARY = sentencepiece.SentencePieceProcessor(model_proto=trained_model())
LIBRARIES = {strip: llama_tokenizer(trained_model(), strip=strip) for strip in (True, False)}
# A vocabulary in which bytes are not the most part: ids of bytes, and of all pieces.
TOKEN = st.one_of(st.integers(3, 258), st.integers(0, 399))
IDS = st.lists(TOKEN, max_size=16)


def byte_ids(data: bytes) -> list[int]:
    """Byte tokens."""
    return [FIRST_BYTE + byte for byte in data]


def closed(ids: list[int]) -> list[int]:
    """The ids with a last piece that is no byte, so that no character is cut by the end."""
    return [*ids, SPM_LIBRARY.piece_to_id("a")]


@given(IDS)
def test_sentencepiece_text_is_what_the_library_decodes(ids: list[int]) -> None:
    ids = closed([token_id for token_id in ids if token_id != SPM_LIBRARY.unk_id()])
    assert decoded(spm(), ids) == SPM_LIBRARY.decode(ids)


@given(IDS, st.booleans(), st.booleans())
def test_whole_runs_are_what_tokenizers_decodes(ids: list[int], skip: bool, strip: bool) -> None:
    ids = closed(ids)
    expected = LIBRARIES[strip].decode(ids, skip_special_tokens=skip)
    assert decoded(llama(strip=strip), ids, skip=skip) == expected


@given(IDS, IDS)
def test_sentencepiece_prompt_and_answer_decode_as_one(prompt: list[int], answer: list[int]) -> None:
    prompt, answer = closed(prompt), closed(answer)
    assert spm().decode(prompt) + decoded(spm(), answer, prompt) == spm().decode(prompt + answer)


@given(IDS, IDS)
def test_whole_runs_prompt_and_answer_decode_as_one(prompt: list[int], answer: list[int]) -> None:
    prompt, answer = closed(prompt), closed(answer)
    assert llama().decode(prompt) + decoded(llama(), answer, prompt) == llama().decode(prompt + answer)


@given(IDS)
@pytest.mark.parametrize("name", ["spm", "llama"])
def test_decode_is_the_joined_text(name: str, ids: list[int]) -> None:
    tokenizer = spm() if name == "spm" else llama()
    assert decoded(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["spm", "llama"])
class TestCutCharacters:
    """Characters that end, or begin, outside of the answer."""

    def test_the_end_cuts_a_character_to_one_replacement(self, name: str) -> None:
        tokenizer = spm() if name == "spm" else llama()
        for length in (1, 2, 3):
            ids = [*byte_ids("\u4f60".encode()), *byte_ids("\U0001f600".encode()[:length])]
            assert decoded(tokenizer, ids) == "\u4f60\ufffd"

    def test_the_prompt_begins_a_character(self, name: str) -> None:
        tokenizer = spm() if name == "spm" else llama()
        begun, rest = byte_ids("\U0001f600".encode()[:2]), byte_ids("\U0001f600".encode()[2:])
        prompt = [*tokenizer.encode("secret"), *begun]
        assert decoded(tokenizer, [*rest, *tokenizer.encode("x", add_special=False)], prompt).strip(" ") in (
            "\U0001f600 x",
            "\U0001f600x",
        )
        assert decoded(tokenizer, [], prompt) == ""
        assert decoded(tokenizer, rest[:1], prompt) == ""

    def test_nothing_of_a_prompt_in_an_empty_answer(self, name: str) -> None:
        tokenizer = spm() if name == "spm" else llama()
        for text in ("", "a", "\u4f60", " a "):
            assert decoded(tokenizer, [], tokenizer.encode(text)) == ""

    def test_streams_without_replacement_characters(self, name: str) -> None:
        tokenizer = spm() if name == "spm" else llama()
        decoder = tokenizer.decoder()
        text = "".join(decoder.push(token_id) for token_id in byte_ids("na\u00efve \u4f60\u597d \U0001f600".encode()))
        assert "\ufffd" not in text
        assert text + decoder.finish() == "na\u00efve \u4f60\u597d \U0001f600"


def table(pieces: list[Piece]) -> PieceTable:
    """A table of these pieces; their ids count from 0."""
    return PieceTable(lambda token_id: pieces[token_id], frozenset())


def test_a_long_run_does_not_wait_for_its_end() -> None:
    text = "\u4f60" * MAX_RUN_BYTES
    decoder = WholeRunDecoder(PieceTable(lambda token_id: token_id, frozenset()), [], strip=1)
    out = [decoder.push(byte) for byte in text.encode()]
    assert len("".join(out)) >= len(text) - MAX_RUN_BYTES // 3 - 1
    assert "".join(out) + decoder.finish() == text


def test_the_text_of_a_run_belongs_to_the_tokens_before() -> None:
    decoder = WholeRunDecoder(table([0xC3, 0xA9, "x"]), [], strip=0)
    assert [decoder.push(token_id) for token_id in (0, 1, 2)] == ["", "", "\u00e9x"]
    assert decoder.late == 1
    assert decoder.push(2) == "x"
    assert decoder.late == 0


@pytest.mark.parametrize(
    ("strip", "text"), [("none", "  a b"), ("one", " a b"), ("all", "a b")], ids=["none", "one", "all"]
)
def test_spaces_at_the_start(strip: str, text: str) -> None:
    pieces = table([" ", " a", " b"])
    decoder = RunDecoder(pieces, [], strip=strip)  # type: ignore[arg-type]
    assert "".join(decoder.push(token_id) for token_id in (0, 1, 2)) == text
    later = RunDecoder(pieces, [1], strip=strip)  # type: ignore[arg-type]
    assert later.push(0) == " "


def test_a_verbatim_piece_keeps_its_space() -> None:
    assert RunDecoder(table([Verbatim(" ?")]), [], strip="one").push(0) == " ?"


def test_byte_pieces() -> None:
    assert [byte_value(piece) for piece in ("<0x0A>", "<0xFF>", "<0xZZ>", "<0x0>", "a")] == [10, 255, None, None, None]
