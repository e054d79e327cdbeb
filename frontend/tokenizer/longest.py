"""How much text one token can stand for at most: with it a text far too long is known before it is tokenized.

A bound holds only where every rule between text and tokens is known to lose nothing. So the rules that keep it are
listed, and whatever is not listed leaves no bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from frontend.tokenizer.base import Tokenizer
from frontend.tokenizer.byte_level import byte_alphabet

KEEPING: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend", "Punctuation", "Split"})
# Canonical composition makes UTF-8 three times shorter at most, and so does the replacement of single characters.
NFC_SHRINKS: Final = 9


def least_tokens(tokenizer: Tokenizer, text: str) -> int:
    """A number of tokens that the text has for sure; 0 where there is no telling."""
    if tokenizer.longest is None:
        return 0
    return -(-len(text.encode(errors="replace")) // tokenizer.longest)


def longest_token(library: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int | None:
    """Bytes of UTF-8 that one token stands for at most; None where nothing bounds them.

    Args:
        library: of a tokenizer.json.
        vocabulary: all pieces, added ones too.
    """
    steps = [*_steps(library.normalizer), *_steps(library.pre_tokenizer)]
    added = library.get_added_tokens_decoder().values()
    # A token that eats the spaces beside it can eat any number of them.
    if any(token.lstrip or token.rstrip for token in added) or not _knows_every_byte(library, steps):
        return None
    shrinks = 1
    for step in steps:
        if step["type"] == "NFC":
            shrinks = NFC_SHRINKS
        elif not _keeps(step):
            return None
    # A character of a piece is a byte, or several: it is never less.
    pieces = max(map(len if _is_byte_level(steps) else _size, vocabulary))
    return shrinks * max([pieces, *(_size(token.content) for token in added)])


def _steps(component: Normalizer | PreTokenizer | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as tokenizer.json spells them."""
    if component is None:
        return []
    spec: dict[str, Any] = json.loads(component.__getstate__())
    return list(spec.get("normalizers", spec.get("pretokenizers", []))) if spec["type"] == "Sequence" else [spec]


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a step leaves a text at least as long as it was."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String", "")
        return bool(pattern) and _size(step["content"]) >= _size(pattern)
    return step["type"] in KEEPING and step.get("behavior") != "Removed"


def _knows_every_byte(library: tokenizers.Tokenizer, steps: list[dict[str, Any]]) -> bool:
    """Whether no part of a text is left out, or put together with others, because the vocabulary lacks it."""
    if not isinstance(library.model, tokenizers.models.BPE):
        return False
    if _is_byte_level(steps):
        return all(library.token_to_id(letter) is not None for letter in byte_alphabet())
    names = (f"<0x{value:02X}>" for value in range(256))
    return library.model.byte_fallback and all(library.token_to_id(name) is not None for name in names)


def _is_byte_level(steps: list[dict[str, Any]]) -> bool:
    return any(step["type"] == "ByteLevel" for step in steps)


def _size(text: str) -> int:
    return len(text.encode())
