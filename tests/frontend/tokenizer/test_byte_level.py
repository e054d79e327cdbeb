"""Byte-level decoding: equal to the library's, character by character."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from frontend.tokenizer.byte_level import ByteLevelDecoder, ByteTable, byte_alphabet
from tests.fixtures.bbpe import SPECIALS, TOOL, byte_characters
from tests.frontend.tokenizer.folders import bbpe, decoded

IDS = st.lists(st.integers(0, 310), max_size=24)
SMILE = list("\U0001f600".encode())


def test_the_alphabet_is_that_of_byte_level_vocabularies() -> None:
    assert byte_alphabet() == {character: byte for byte, character in enumerate(byte_characters())}


@given(IDS, st.booleans())
def test_joined_pieces_are_the_decoded_text(ids: list[int], skip: bool) -> None:
    tokenizer = bbpe()
    assert decoded(tokenizer, ids, skip=skip) == tokenizer.decode(ids, skip_special=skip)


@given(st.text(max_size=20))
def test_no_replacement_character_comes_before_a_character_is_whole(text: str) -> None:
    decoder = bbpe().decoder()
    text = text.replace("\ufffd", "?")
    assert "\ufffd" not in "".join([decoder.push(byte) for byte in text.encode("utf-8", "ignore")])
    assert decoder.finish() == ""


@given(IDS, IDS)
def test_prompt_and_answer_decode_as_one(prompt: list[int], answer: list[int]) -> None:
    tokenizer = bbpe()
    before, both = tokenizer.decode(prompt), tokenizer.decode(prompt + answer)
    # A character cut by the prompt's end is U+FFFD there, unless the answer completes it.
    kept = before if both.startswith(before) else before.removesuffix("\ufffd")
    assert kept + decoded(tokenizer, answer, prompt) == both


def test_a_character_that_the_prompt_begins_comes_whole_and_nothing_of_the_prompt() -> None:
    prompt = [*b"secret ", *SMILE[:3]]
    assert decoded(bbpe(), [SMILE[3], ord("!")], prompt) == "\U0001f600!"
    assert decoded(bbpe(), [ord("!")], prompt) == "!"
    assert decoded(bbpe(), [], prompt) == ""


def test_a_character_cut_at_the_end_gives_one_replacement() -> None:
    for length in (1, 2, 3):
        assert decoded(bbpe(), [*b"ok", *SMILE[:length]]) == "ok\ufffd"


def test_special_tokens_are_skipped_or_spelled() -> None:
    ids = [ord("x"), SPECIALS[TOOL], ord("y")]
    assert decoded(bbpe(), ids) == "xy"
    assert decoded(bbpe(), ids, skip=False) == f"x{TOOL}y"


def test_unknown_ids_have_no_text() -> None:
    assert decoded(bbpe(), [ord("x"), 100_000, ord("y")]) == "xy"


def test_a_long_prompt_costs_its_end_only() -> None:
    asked: list[int] = []

    def piece(token_id: int) -> str | None:
        asked.append(token_id)
        return "a"

    prompt: Sequence[int] = range(10_000)
    ByteLevelDecoder(ByteTable(piece, frozenset()), prompt)
    assert len(asked) == 4
