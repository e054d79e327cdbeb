"""Special tokens: what a folder's files say of them, and where their literals stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from frontend.errors import TokenizerError
from frontend.model_folder import read_object

NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedToken:
    """A token that a folder's configuration adds to the vocabulary.

    Attributes:
        content: its literal.
        special: whether it is a control token.
        lstrip, rstrip, single_word, normalized: how the tokenizers library matches it.
    """

    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def template_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that templates know by name ("bos_token" ...), as tokenizer_config.json gives them."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if name in NAMES or (name.endswith("_token") and not name.startswith("add_")):
            literal = value.get("content") if isinstance(value, dict) else value
            if isinstance(literal, str):
                found[name] = literal
    return found


def extra_specials(config: Mapping[str, Any]) -> list[str]:
    """Literals of further special tokens that tokenizer_config.json lists without a name."""
    found: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key)
        values = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
        for value in values:
            literal = value.get("content") if isinstance(value, dict) else value
            if isinstance(literal, str):
                found.append(literal)
    return found


def added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Added tokens by id, of tokenizer_config.json and added_tokens.json.

    Raises:
        TokenizerError: an entry has not the form that it must have.
    """
    named = {*template_variables(config).values(), *extra_specials(config)}
    found: dict[int, AddedToken] = {}
    for literal, token_id in read_object(folder / "added_tokens.json", optional=True).items():
        if type(token_id) is not int:
            raise TokenizerError(folder / "added_tokens.json", f"{literal!r}: must have an id, has {token_id!r}")
        found[token_id] = AddedToken(literal, literal in named)
    path = folder / "tokenizer_config.json"
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        raise TokenizerError(path, "added_tokens_decoder: must be an object")
    for key, entry in listed.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isascii() or not key.isdigit() or not isinstance(content, str) or not content:
            raise TokenizerError(path, f"added_tokens_decoder: entry {key!r} must be an id with a content")
        flags = {name: entry.get(name) is True for name in ("lstrip", "rstrip", "single_word", "normalized")}
        found[int(key)] = AddedToken(content, entry.get("special") is True or content in named, **flags)
    return found


def literal_pattern(literals: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds these literals, of several at one place the longest; it matches nothing without any."""
    ordered = sorted((re.escape(literal) for literal in literals if literal), key=len, reverse=True)
    return re.compile("|".join(ordered) if ordered else r"(?!)")
