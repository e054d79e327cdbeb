"""Tokens to text: equal however they come, cut at stop strings, with the tokens that stand for the text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.detokenizer import Detokenizer, TokenPiece
from frontend.tokenizer.base import Tokenizer
from tests.fixtures.bbpe import SPECIALS, TOOL, Bbpe
from tests.frontend.tokenizer.folders import bbpe, llama, spm

TOKENIZERS = {"bbpe": bbpe, "spm": spm, "llama": llama}
IDS = st.lists(st.integers(0, 310), max_size=20)
STOPS = st.lists(st.text(alphabet="the .\ufffd", min_size=1, max_size=3), max_size=3)


class Words:
    """A decoder of given pieces."""

    late = 0

    def __init__(self, *pieces: str, tail: str = "") -> None:
        self.pieces, self.tail = pieces, tail

    def push(self, token_id: int) -> str:
        """The piece of that index."""
        return self.pieces[token_id]

    def finish(self) -> str:
        """What was cut."""
        return self.tail


def run(detokenizer: Detokenizer, ids: list[int], *, batch: int = 1) -> tuple[list[str], list[TokenPiece]]:
    """The texts and tokens that come, taken every `batch` tokens."""
    texts: list[str] = []
    tokens: list[TokenPiece] = []

    def take() -> None:
        text, taken = detokenizer.take()
        tokens.extend(taken)
        if text:
            texts.append(text)

    for index, token_id in enumerate(ids):
        detokenizer.push(token_id)
        if detokenizer.stop is not None:
            break
        if index % batch == 0:
            take()
    detokenizer.finish()
    take()
    return texts, tokens


@pytest.mark.parametrize("name", TOKENIZERS)
@given(ids=IDS, batch=st.integers(1, 5), stops=STOPS)
def test_text_and_tokens_do_not_depend_on_how_tokens_come(
    name: str, ids: list[int], batch: int, stops: list[str]
) -> None:
    tokenizer = TOKENIZERS[name]()
    whole = Detokenizer(tokenizer.decoder(), stop=stops)
    parted = Detokenizer(tokenizer.decoder(), stop=stops)
    texts, tokens = run(whole, ids, batch=1)
    other_texts, other_tokens = run(parted, ids, batch=batch)
    assert "".join(texts) == "".join(other_texts)
    assert tokens == other_tokens
    assert (whole.stop, whole.count) == (parted.stop, parted.count)
    full = tokenizer.decode(ids)
    if whole.stop is None:
        assert "".join(texts) == full
        assert [token.token_id for token in tokens] == ids
    assert full.startswith("".join(texts))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(ids=IDS)
def test_pieces_make_the_text(name: str, ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZERS[name]().decoder())
    texts, tokens = run(detokenizer, ids)
    whole, end = "".join(texts), 0
    for token in tokens:
        assert whole.startswith(token.text, token.offset)
        # What lies between two pieces is what became of bytes that are no character.
        assert not whole[end : token.offset].strip("\ufffd")
        end = token.offset + len(token.text)
    assert not whole[end:].strip("\ufffd")


def test_a_stop_string_over_several_tokens() -> None:
    words = Words("ABC", "DEF", "G", "HI", "J", "K")
    detokenizer = Detokenizer(words, stop=["DEFGHIJ"])
    texts, tokens = run(detokenizer, [0, 1, 2, 3, 4, 5])
    assert texts == ["ABC"]
    assert [token.token_id for token in tokens] == [0]
    assert (detokenizer.stop, detokenizer.count) == ("DEFGHIJ", 5)


def test_the_last_token_holds_the_last_returned_character() -> None:
    detokenizer = Detokenizer(Words("ABCD", "", "EF"), stop=["DE"])
    texts, tokens = run(detokenizer, [0, 1, 2])
    assert "".join(texts) == "ABC"
    assert [token.token_id for token in tokens] == [0]
    assert tokens[0].text == "ABCD"


def test_a_stop_string_at_once_leaves_nothing() -> None:
    texts, tokens = run(Detokenizer(Words("..."), stop=[".."]), [0])
    assert (texts, tokens) == ([], [])


def test_include_stop() -> None:
    texts, tokens = run(Detokenizer(Words("a", "...", "b"), stop=[".."], include_stop=True), [0, 1, 2])
    assert "".join(texts) == "a.."
    assert [token.token_id for token in tokens] == [0, 1]


def test_tokens_without_text_come_with_the_next_that_has_some() -> None:
    detokenizer = Detokenizer(Words("a", "", "b"))
    detokenizer.push(0)
    assert detokenizer.take() == ("a", [TokenPiece(0, "a", 0)])
    detokenizer.push(1)
    assert detokenizer.take() == ("", [])
    detokenizer.push(2)
    assert detokenizer.take() == ("b", [TokenPiece(1, "", 1), TokenPiece(2, "b", 1)])


def test_at_the_end_all_tokens_come() -> None:
    detokenizer = Detokenizer(Words("a", "", tail="?"))
    texts, tokens = run(detokenizer, [0, 1])
    assert texts == ["a", "?"]
    assert tokens == [TokenPiece(0, "a", 0), TokenPiece(1, "?", 1)]


def test_a_hidden_token_counts_but_has_no_text() -> None:
    detokenizer = Detokenizer(Words("a", "b"))
    detokenizer.push(0)
    detokenizer.push(1, hidden=True)
    detokenizer.finish()
    assert detokenizer.take() == ("a", [TokenPiece(0, "a", 0), TokenPiece(1, "", 1)])
    assert detokenizer.count == 2


def test_no_stop_string_counts_before_min_tokens() -> None:
    detokenizer = Detokenizer(Words("x."), stop=["."], min_tokens=3)
    texts, tokens = run(detokenizer, [0, 0, 0, 0])
    assert "".join(texts) == "x.x.x"
    assert detokenizer.count == 3
    assert len(tokens) == 3


def test_a_stop_string_in_what_the_end_gives() -> None:
    detokenizer = Detokenizer(Words("a", "", tail="\ufffd"), stop=["\ufffd"])
    texts, tokens = run(detokenizer, [0, 1])
    assert texts == ["a"]
    assert [token.token_id for token in tokens] == [0]
    assert detokenizer.stop == "\ufffd"


def test_text_of_a_byte_run_belongs_to_its_last_byte() -> None:
    tokenizer = llama()
    ids = [3 + byte for byte in "\u4f60".encode()] + tokenizer.encode("x", add_special=False)[-1:]
    texts, tokens = run(Detokenizer(tokenizer.decoder(), stop=["x"]), ids)
    assert "".join(texts) == "\u4f60"
    assert [token.text for token in tokens] == ["", "", "\u4f60"]


def test_special_tokens_in_the_middle() -> None:
    ids = [ord("x"), SPECIALS[TOOL], ord("y")]
    texts, tokens = run(Detokenizer(bbpe().decoder()), ids)
    assert "".join(texts) == "xy"
    assert [token.text for token in tokens] == ["x", "", "y"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_costs_little(name: str) -> None:
    tokenizer: Tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog and \u4f60\u597d. " * 50, add_special=False)
    detokenizer = Detokenizer(tokenizer.decoder(), stop=["\n\nUser:", "</answer>"])
    started = time.thread_time()
    for token_id in ids:
        detokenizer.push(token_id)
        detokenizer.take()
    assert (time.thread_time() - started) / len(ids) < 100e-6


def test_many_tokens_without_text_cost_linear_time() -> None:
    detokenizer = Detokenizer(Words(""))
    started = time.thread_time()
    for _ in range(20_000):
        detokenizer.push(0)
        detokenizer.take()
    assert time.thread_time() - started < 5.0


def test_a_token_that_ends_inside_a_character_waits() -> None:
    made = Bbpe()
    detokenizer = Detokenizer(bbpe().decoder())
    detokenizer.push(made.token_id(b"\xe4\xbd"))
    assert detokenizer.take() == ("", [])
    detokenizer.push(0xA0)
    assert detokenizer.take()[0] == "\u4f60"
