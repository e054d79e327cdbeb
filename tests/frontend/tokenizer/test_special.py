"""What a folder's files say of special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frontend.errors import TokenizerError
from frontend.tokenizer.special import (
    AddedToken,
    added_tokens,
    extra_specials,
    literal_pattern,
    template_variables,
)


def test_names_of_templates_come_as_text_or_object() -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "image_token": "<image>",
    }
    assert template_variables(config) == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}


def test_further_special_tokens_are_a_list_or_an_object() -> None:
    config = {"additional_special_tokens": ["<a>", {"content": "<b>"}], "extra_special_tokens": {"c_token": "<c>"}}
    assert extra_specials(config) == ["<a>", "<b>", "<c>"]


def test_added_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 7, "<y>": 8}))
    config = {
        "eos_token": "<y>",
        "added_tokens_decoder": {"9": {"content": "<z>", "special": True, "lstrip": True}},
    }
    assert added_tokens(tmp_path, config) == {
        7: AddedToken("<x>", special=False),
        8: AddedToken("<y>", special=True),
        9: AddedToken("<z>", special=True, lstrip=True),
    }


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": 2}},
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(TokenizerError, match="added_tokens_decoder"):
        added_tokens(tmp_path, config)


def test_a_wrong_id_is_named(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": "7"}))
    with pytest.raises(TokenizerError, match="'<x>'"):
        added_tokens(tmp_path, {})


def test_the_longest_literal_is_found() -> None:
    pattern = literal_pattern(["<|a|>", "<|a|>b", "x.y"])
    assert pattern.findall("<|a|>b <|a|>c xzy x.y") == ["<|a|>b", "<|a|>", "x.y"]
    assert literal_pattern([]).findall("anything") == []
