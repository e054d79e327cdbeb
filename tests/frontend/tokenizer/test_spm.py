"""tokenizer.model: spaces, special and added tokens, broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from frontend.errors import TokenizerError
from frontend.tokenizer.base import Rendered, Tokenizer
from frontend.tokenizer.load import load_tokenizer
from tests.fixtures.spm import Spm, trained_model, write_spm
from tests.frontend.tokenizer.folders import spm

LIBRARY = sentencepiece.SentencePieceProcessor(model_proto=trained_model())
ADDED = {
    "400": {"content": "<|turn|>", "special": True},
    "401": {"content": "<think>", "special": False},
}


def tokenizer_with(folder: Path, **config: Any) -> Tokenizer:
    """The trained vocabulary under another configuration."""
    write_spm(folder, trained_model())
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return load_tokenizer(folder)


def test_facts_of_the_tokenizer() -> None:
    tokenizer = spm()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 400)
    assert tokenizer.special_tokens == {"<s>": 1, "</s>": 2}
    assert tokenizer.template_variables == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@given(st.text(max_size=30))
def test_plain_text_is_encoded_as_the_library_does(text: str) -> None:
    assert spm().encode(text, add_special=False, parse_special=False) == LIBRARY.encode(text)


def test_one_bos_and_no_eos() -> None:
    assert spm().encode("Hello") == [1, *LIBRARY.encode("Hello")]
    assert spm().encode("<s>Hello").count(1) == 1
    assert spm().encode("") == [1]


def test_add_bos_token_false(tmp_path: Path) -> None:
    assert tokenizer_with(tmp_path, add_bos_token=False).encode("Hello") == LIBRARY.encode("Hello")


def test_special_literals_are_parsed_or_plain() -> None:
    assert spm().encode("a</s>b", add_special=False)[1:2] == [2]
    plain = spm().encode("a</s>b", add_special=False, parse_special=False)
    assert 2 not in plain
    assert spm().decode(plain) == "a</s>b"


@pytest.mark.parametrize(("legacy", "expected"), [(False, "b"), (True, " b")])
def test_the_space_behind_a_special_token(tmp_path: Path, legacy: bool, expected: str) -> None:
    tokenizer = tokenizer_with(tmp_path, legacy=legacy)
    ids = tokenizer.encode("a</s>b", add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == f"a</s>{expected}"


def test_added_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, added_tokens_decoder=ADDED)
    assert tokenizer.vocab_size == 402
    ids = tokenizer.encode("a<|turn|><think>", add_special=False)
    assert ids[-2:] == [400, 401]
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special=False) == "a<|turn|><think>"
    assert tokenizer.token_text(400) == "<|turn|>"


def test_rendered_prompts_keep_literals_of_messages_plain(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, added_tokens_decoder=ADDED)
    text = "<|turn|>say <|turn|>now</s>"
    plain = ((12, 20),)
    assert text[12:20] == "<|turn|>"
    ids = tokenizer.encode_rendered(Rendered(text, plain))
    assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == [400, 2]
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.encode_rendered(Rendered(text)) == tokenizer.encode(text, add_special=False)


def test_a_control_token_that_the_model_reads_itself_is_cut_in_plain_text(tmp_path: Path) -> None:
    model = Spm(("a", "b", "\u2581")).model()
    write_spm(tmp_path, model)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a</s>b", add_special=False, parse_special=False)
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == "a</s>b"


def test_leading_spaces_of_a_model_that_keeps_them(tmp_path: Path) -> None:
    made = Spm(("\u2581", "a", "\u2581a"))
    write_spm(tmp_path, made.model())
    tokenizer = load_tokenizer(tmp_path)
    space, spaced = made.token_id("\u2581"), made.token_id("\u2581a")
    library = sentencepiece.SentencePieceProcessor(model_proto=made.model())
    for ids in ([space, space, spaced], [spaced, spaced], [space], [space, spaced], [1, spaced]):
        assert tokenizer.decode(ids) == library.decode(ids)


def test_token_bytes() -> None:
    assert spm().token_bytes(3 + 0xE4) == b"\xe4"
    assert spm().token_text(3 + 0xE4) == "\ufffd"
    assert spm().token_text(1) == "<s>"
    assert spm().token_text(10_000) == ""


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)
