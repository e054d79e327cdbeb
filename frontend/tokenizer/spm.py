"""Tokenizers of the form tokenizer.model, read with the sentencepiece library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import sentencepiece

from frontend.errors import TokenizerError
from frontend.tokenizer.base import Rendered, TextDecoder, TokenBound, without_surrogates
from frontend.tokenizer.byte_runs import LeadingSpaces, Piece, PieceTable, RunDecoder, Verbatim, byte_value
from frontend.tokenizer.special import AddedToken, added_tokens, literal_pattern, template_variables

SPACE: Final = "▁"
# Added to a serialized model, this sets normalizer_spec.add_dummy_prefix to false: fields of a repeated message merge.
WITHOUT_DUMMY_PREFIX: Final = b"\x1a\x02\x18\x00"


class SpmTokenizer:
    """Tokenizer over a sentencepiece model; the attributes are those of base.Tokenizer.

    Args:
        model: the serialized model.
        config: tokenizer_config.json.
        added: added tokens by id; ids inside the model's own range say what is special there.
        source: for messages.

    Raises:
        RuntimeError: the bytes are no model.
    """

    def __init__(self, model: bytes, config: Mapping[str, Any], added: Mapping[int, AddedToken], source: str) -> None:
        self.source = source
        # What its normalizer drops, the library does not tell.
        self.bound: TokenBound | None = None
        self._first = sentencepiece.SentencePieceProcessor(model_proto=model)
        # Text behind a special token gets no space put in front, unless the model was made the old way.
        legacy = config.get("legacy") is True
        self._later = (
            self._first if legacy else sentencepiece.SentencePieceProcessor(model_proto=model + WITHOUT_DUMMY_PREFIX)
        )
        self._size: int = self._first.get_piece_size()
        self._added = dict(added)
        self.vocab_size = max([self._size, *(token_id + 1 for token_id in added)])
        self.template_variables: Mapping[str, str] = MappingProxyType(self._variables(config))
        self.special_tokens: Mapping[str, int] = MappingProxyType(self._find_special())
        self.special_ids = frozenset(self.special_tokens.values())
        ordinary = {token.content: token_id for token_id, token in added.items() if not token.special}
        self._literals = {**ordinary, **self.special_tokens}
        self._every_literal = literal_pattern(self._literals)
        self._ordinary_literal = literal_pattern(ordinary)
        self._special_literal = literal_pattern(self.special_tokens)
        self.bos_id = self._named("bos_token")
        self.eos_id = self._named("eos_token")
        wanted = config.get("add_bos_token", True) is True
        self._prefix = [self.bos_id] if wanted and self.bos_id is not None else []
        self._strip = self._leading_spaces()
        self._tables = {
            skip: PieceTable(self._piece, self.special_ids if skip else frozenset(), blank="") for skip in (True, False)
        }

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any]) -> SpmTokenizer:
        """Read a sentencepiece file, with the added tokens that its neighbours name.

        Raises:
            TokenizerError: the file is no sentencepiece model.
        """
        try:
            return cls(path.read_bytes(), config, added_tokens(path.parent, config), f"{path} (sentencepiece)")
        except (OSError, RuntimeError, ValueError) as error:
            raise TokenizerError(path, f"is no sentencepiece model: {error}") from error

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """See base.Tokenizer."""
        text = without_surrogates(text)
        ids = self._split(text, self._every_literal if parse_special else self._ordinary_literal, text)
        if not add_special or (self._prefix and ids[:1] == self._prefix):
            return ids
        return self._prefix + ids

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """See base.Tokenizer."""
        text = list(rendered.text)
        for start, end in rendered.plain:
            text[start:end] = "\0" * (end - start)
        # Equal length keeps the places: literals are looked for where plain spans are blotted out.
        return self._split(rendered.text, self._every_literal, "".join(text))

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """See base.Tokenizer."""
        decoder = self.decoder(skip_special=skip_special)
        return "".join([decoder.push(token_id) for token_id in token_ids]) + decoder.finish()

    def decoder(self, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> TextDecoder:
        """See base.Tokenizer."""
        return RunDecoder(self._tables[skip_special], prompt_ids, strip=self._strip)

    def token_text(self, token_id: int) -> str:
        """See base.Tokenizer."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See base.Tokenizer."""
        piece = self._tables[False][token_id]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()

    def _variables(self, config: Mapping[str, Any]) -> dict[str, str]:
        found = template_variables(config)
        library = self._first
        for name, token_id in (
            ("bos_token", library.bos_id()),
            ("eos_token", library.eos_id()),
            ("unk_token", library.unk_id()),
        ):
            if name not in config and token_id >= 0:
                found[name] = library.id_to_piece(token_id)
        return found

    def _find_special(self) -> dict[str, int]:
        library = self._first
        found = {library.id_to_piece(index): index for index in range(self._size) if library.is_control(index)}
        found |= {token.content: token_id for token_id, token in self._added.items() if token.special}
        for name in ("bos_token", "eos_token"):
            literal = self.template_variables.get(name)
            if literal is not None and literal not in found:
                token_id = library.piece_to_id(literal)
                if library.id_to_piece(token_id) == literal:
                    found[literal] = token_id
        return found

    def _named(self, name: str) -> int | None:
        literal = self.template_variables.get(name)
        return None if literal is None else self.special_tokens.get(literal)

    def _split(self, text: str, literal: re.Pattern[str], searched: str) -> list[int]:
        """Ids of the text: literals found in `searched` (as long as the text) are their tokens, the rest is text."""
        ids: list[int] = []
        position = 0
        for match in literal.finditer(searched):
            ids += self._text(text[position : match.start()], at_start=position == 0)
            ids.append(self._literals[match.group()])
            position = match.end()
        return ids + self._text(text[position:], at_start=position == 0)

    def _text(self, text: str, *, at_start: bool) -> list[int]:
        if not text:
            return []
        ids: list[int] = (self._first if at_start else self._later).encode(text)
        if self.special_ids.isdisjoint(ids):
            return ids
        # A control token that the model itself reads from its literal: cut the literal.
        cuts = [0, *(match.start() + 1 for match in self._special_literal.finditer(text)), len(text)]
        if len(cuts) == 2:
            return ids
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        ids = (self._first if at_start else self._later).encode(pieces[0])
        for piece in pieces[1:]:
            ids += self._later.encode(piece)
        return ids

    def _piece(self, token_id: int) -> Piece:
        library = self._first
        if token_id in self._added:
            return Verbatim(self._added[token_id].content)
        if not 0 <= token_id < self._size:
            return None
        piece: str = library.id_to_piece(token_id)
        if library.is_byte(token_id):
            return byte_value(piece)
        if library.is_unknown(token_id):
            return Verbatim(library.decode([token_id]))
        return Verbatim(piece) if library.is_control(token_id) else piece.replace(SPACE, " ")

    def _leading_spaces(self) -> LeadingSpaces:
        """What the library does with spaces at the start of a text; seen from what it does, as it does not tell."""
        library = self._first
        ordinary = (index for index in range(self._size) if len(library.id_to_piece(index)) > 1)
        sample = next((index for index in ordinary if library.id_to_piece(index).startswith(SPACE)), None)
        if sample is None or library.decode([sample]).startswith(" "):
            return "none"
        space = library.piece_to_id(SPACE)
        if library.id_to_piece(space) != SPACE or library.decode([space, space, sample]).startswith(" "):
            return "one"
        return "all"
