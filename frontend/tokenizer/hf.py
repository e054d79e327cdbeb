"""Tokenizers of the form tokenizer.json, read with the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import tokenizers

from frontend.errors import TokenizerError
from frontend.tokenizer.base import Rendered, TextDecoder, without_surrogates
from frontend.tokenizer.byte_level import ByteLevelDecoder, ByteTable
from frontend.tokenizer.byte_runs import Piece, PieceTable, WholeRunDecoder, byte_value
from frontend.tokenizer.longest import token_bound
from frontend.tokenizer.special import added_tokens, extra_specials, literal_pattern, template_variables
from frontend.tokenizer.window import WindowDecoder

# Stand for the template's own special tokens in a tokenizer that takes no special literal for a token; noncharacters,
# so that no text needs them. One for each way a special token eats the spaces around it (lstrip, rstrip).
STAND_INS: Final = {
    (False, False): "\ufdd0",
    (True, False): "\ufdd1",
    (False, True): "\ufdd2",
    (True, True): "\ufdd3",
}
# Any text: shows what the tokenizer puts in front of it and behind.
PROBE: Final = "a"


class HfTokenizer:
    """Tokenizer over a tokenizer.json; the attributes are those of base.Tokenizer.

    Args:
        library: the tokenizer as read.
        config: tokenizer_config.json.
        source: for messages.
    """

    def __init__(self, library: tokenizers.Tokenizer, config: Mapping[str, Any], source: str) -> None:
        self.source = source
        self._library = library
        library.no_truncation()
        library.no_padding()
        self.template_variables: Mapping[str, str] = MappingProxyType(template_variables(config))
        self._mark_special([*self.template_variables.values(), *extra_specials(config)])
        added = library.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = MappingProxyType(
            {token.content: token_id for token_id, token in sorted(added.items()) if token.special}
        )
        self._strips = {token_id: (token.lstrip, token.rstrip) for token_id, token in added.items()}
        self.special_ids = frozenset(self.special_tokens.values())
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.bound = token_bound(library, vocabulary)
        self.bos_id = self._named("bos_token")
        self.eos_id = self._named("eos_token")
        self._prefix = self._find_prefix(config)
        self._pattern = literal_pattern(self.special_tokens)
        self._rule = DecodingRule.of(library)
        self._tables: dict[bool, ByteTable | PieceTable] = {skip: self._table(skip) for skip in (True, False)}

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any]) -> HfTokenizer:
        """Read a tokenizer.json, with the added tokens that its neighbours name.

        Raises:
            TokenizerError: the file is broken, or needs what the library does not have.
        """
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        # The library raises plain Exception for whatever is wrong with a file.
        except Exception as error:
            raise TokenizerError(path, f"is no tokenizer: {error}") from error
        _add_missing(library, path, config)
        return cls(library, config, f"{path} (tokenizers)")

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """See base.Tokenizer."""
        text = without_surrogates(text)
        ids = _ids(self._library if parse_special else self._plain, text)
        if not add_special or (self._prefix and ids[: len(self._prefix)] == self._prefix):
            return ids
        return self._prefix + ids

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """See base.Tokenizer."""
        if not rendered.plain:
            return _ids(self._library, without_surrogates(rendered.text))
        text, specials = self._with_stand_ins(rendered)
        found = iter(specials)
        stand_ins = self._stand_in_ids
        return [next(found) if token_id in stand_ins else token_id for token_id in _ids(self._plain, text)]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """See base.Tokenizer."""
        if self._rule.kind != "whole_runs":
            return self._library.decode(list(token_ids), skip_special_tokens=skip_special)
        decoder = self.decoder(skip_special=skip_special)
        return "".join([decoder.push(token_id) for token_id in token_ids]) + decoder.finish()

    def decoder(self, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> TextDecoder:
        """See base.Tokenizer."""
        table = self._tables[skip_special]
        if self._rule.kind == "window":
            return WindowDecoder(lambda ids: self._library.decode(ids, skip_special_tokens=skip_special), prompt_ids)
        if isinstance(table, ByteTable):
            return ByteLevelDecoder(table, prompt_ids)
        return WholeRunDecoder(table, prompt_ids, strip=self._rule.strip)

    def token_text(self, token_id: int) -> str:
        """See base.Tokenizer."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See base.Tokenizer."""
        if self._rule.kind == "window":
            return self._library.decode([token_id], skip_special_tokens=False).encode()
        piece = self._tables[False][token_id]
        if isinstance(piece, bytes):
            return piece
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()

    def _named(self, name: str) -> int | None:
        literal = self.template_variables.get(name)
        return None if literal is None else self._library.token_to_id(literal)

    def _mark_special(self, literals: Iterable[str]) -> None:
        known = self._library.get_added_tokens_decoder()
        special = {token.content for token in known.values() if token.special}
        missing = [name for name in dict.fromkeys(literals) if name not in special and self._has(name)]
        if missing:
            self._library.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in missing])

    def _has(self, literal: str) -> bool:
        return self._library.token_to_id(literal) is not None

    def _find_prefix(self, config: Mapping[str, Any]) -> list[int]:
        """What stands in front of a text: what the file's post-processor puts there, else BOS if it is asked for.

        transformers 5 too lets the post-processor win over add_bos_token.
        """
        bare = self._library.encode(PROBE, add_special_tokens=False).ids
        full = self._library.encode(PROBE, add_special_tokens=True).ids
        for start in range(1, len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        return [self.bos_id] if config.get("add_bos_token") is True and self.bos_id is not None else []

    def _table(self, skip_special: bool) -> ByteTable | PieceTable:
        skipped = self.special_ids if skip_special else frozenset[int]()
        if self._rule.kind == "bytes":
            return ByteTable(self._library.id_to_token, skipped)
        return PieceTable(self._piece, skipped)

    def _piece(self, token_id: int) -> Piece:
        piece = self._library.id_to_token(token_id)
        if piece is None:
            return None
        value = byte_value(piece)
        return piece.replace("▁", " ") if value is None else value

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second tokenizer, made when it is first needed, to which special literals are text."""
        plain = tokenizers.Tokenizer.from_str(self._library.to_str())
        plain.encode_special_tokens = True
        plain.add_tokens(
            [
                tokenizers.AddedToken(literal, lstrip=left, rstrip=right, normalized=False, special=False)
                for (left, right), literal in STAND_INS.items()
            ]
        )
        return plain

    @cached_property
    def _stand_in_ids(self) -> frozenset[int]:
        found = {self._plain.token_to_id(literal) for literal in STAND_INS.values()}
        return frozenset(token_id for token_id in found if token_id is not None)

    def _with_stand_ins(self, rendered: Rendered) -> tuple[str, list[int]]:
        """The text with a stand-in for each special literal outside of plain spans, and what they stand for."""
        out: list[str] = []
        specials: list[int] = []

        def stand_in(match: Any) -> str:  # noqa: ANN401 - re.Match[str]
            token_id = self.special_tokens[match.group()]
            specials.append(token_id)
            return STAND_INS[self._strips[token_id]]

        position = 0
        for start, end in (*rendered.plain, (len(rendered.text), len(rendered.text))):
            out.append(self._pattern.sub(stand_in, _clear(rendered.text[position:start])))
            out.append(_clear(rendered.text[start:end]))
            position = end
        return "".join(out), specials


def _ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call lets other threads run; the plain one holds the interpreter all the while.
    return library.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _clear(text: str) -> str:
    """The text without surrogates, and without the characters that stand for special tokens."""
    for literal in STAND_INS.values():
        text = text.replace(literal, "\ufffd")
    return without_surrogates(text)


def _add_missing(library: tokenizers.Tokenizer, path: Path, config: Mapping[str, Any]) -> None:
    known = library.get_added_tokens_decoder()
    for token_id, token in sorted(added_tokens(path.parent, config).items()):
        if token_id in known:
            continue
        made = tokenizers.AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )
        (library.add_special_tokens if token.special else library.add_tokens)([made])
        given = library.token_to_id(token.content)
        if given != token_id:
            raise TokenizerError(path, f"added token {token.content!r}: has id {given}, must have {token_id}")


@dataclass(frozen=True)
class DecodingRule:
    """How the decoder of a tokenizer.json reads.

    Attributes:
        kind: "bytes", "whole_runs", or "window" for all that is not followed here.
        strip: with "whole_runs": spaces at the start of a text that are dropped.
    """

    kind: Literal["bytes", "whole_runs", "window"]
    strip: int = 0

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> DecodingRule:
        """The rule of a tokenizer."""
        state = None if library.decoder is None else library.decoder.__getstate__()
        spec: dict[str, Any] = {} if state is None else json.loads(state)
        steps: list[dict[str, Any]] = spec["decoders"] if spec.get("type") == "Sequence" else [spec]
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            return cls("bytes")
        spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[0] != spaces or len(steps) > 4:
            return cls("window")
        strip: dict[str, Any] = (
            steps[3] if len(steps) == 4 else {"type": "Strip", "content": " ", "start": 0, "stop": 0}
        )
        if strip.get("type") != "Strip" or strip.get("content") != " " or strip.get("stop") != 0:
            return cls("window")
        return cls("whole_runs", int(strip["start"]))
