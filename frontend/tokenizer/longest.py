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

from frontend.tokenizer.base import TokenBound, Tokenizer
from frontend.tokenizer.byte_level import byte_alphabet

KEEPING: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend", "Punctuation", "Split"})
# Those of them that leave every byte the byte it was.
EXACT: Final = KEEPING - {"Metaspace"}
# Canonical composition makes UTF-8 three times shorter at most, and so does the replacement of single characters.
NFC_SHRINKS: Final = 9


def least_tokens(tokenizer: Tokenizer, text: str) -> int:
    """A number of tokens that the text has for sure; 0 where there is no telling."""
    bound = tokenizer.bound
    if bound is None:
        return 0
    # A lone surrogate becomes a character whose bytes may be among the lost ones.
    encoded = text.encode(errors="ignore" if bound.lost else "replace").translate(None, bound.lost)
    return -(-len(encoded) // bound.longest)


def token_bound(library: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> TokenBound | None:
    """How much text one token stands for at most; None where nothing bounds it.

    Args:
        library: of a tokenizer.json.
        vocabulary: all pieces, added ones too.
    """
    steps = [*_steps(library.normalizer), *_steps(library.pre_tokenizer)]
    added = library.get_added_tokens_decoder().values()
    # A token that eats the spaces beside it can eat any number of them.
    lost = _lost_bytes(library, steps)
    if lost is None or any(token.lstrip or token.rstrip for token in added):
        return None
    # Where a step writes other bytes, one that is known may become one that is lost.
    if lost and not all(step["type"] in EXACT for step in steps):
        return None
    shrinks = 1
    for step in steps:
        if step["type"] == "NFC":
            shrinks = NFC_SHRINKS
        elif not _keeps(step):
            return None
    # A character of a piece is a byte, or several: it is never less.
    pieces = max(map(len if _is_byte_level(steps) else _size, vocabulary))
    return TokenBound(shrinks * max([pieces, *(_size(token.content) for token in added)]), lost)


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


def _lost_bytes(library: tokenizers.Tokenizer, steps: list[dict[str, Any]]) -> bytes | None:
    """The bytes that the vocabulary lacks; None where what it lacks is not known by bytes."""
    if not isinstance(library.model, tokenizers.models.BPE):
        return None
    if _is_byte_level(steps):
        return bytes(value for letter, value in byte_alphabet().items() if library.token_to_id(letter) is None)
    names = (f"<0x{value:02X}>" for value in range(256))
    known = library.model.byte_fallback and all(library.token_to_id(name) is not None for name in names)
    return b"" if known else None


def _is_byte_level(steps: list[dict[str, Any]]) -> bool:
    return any(step["type"] == "ByteLevel" for step in steps)


def _size(text: str) -> int:
    return len(text.encode())
