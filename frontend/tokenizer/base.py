"""What the server needs of a tokenizer, whatever library reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Rendered:
    """A prompt that a chat template made.

    Attributes:
        text: the prompt.
        plain: (start, end) of character spans, ascending and disjoint, in which the literals of special tokens
            came with the messages: they are text there, not control tokens.
    """

    text: str
    plain: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TokenBound:
    """How much text one token stands for at most.

    Attributes:
        longest: bytes of UTF-8.
        lost: bytes that the vocabulary lacks; in a text they may become no token at all.
    """

    longest: int
    lost: bytes = b""


class TextDecoder(Protocol):
    """Turns the tokens of one answer into text, one by one.

    All that push and finish give, joined, is what Tokenizer.decode gives for prompt and answer together, less what
    it gives for the prompt. No text of the prompt is ever given, and no replacement character stands for a character
    that a later token completes.

    Attributes:
        late: how many characters at the start of what push just gave belong to the tokens before.
    """

    late: int

    def push(self, token_id: int) -> str:
        """The text that this token made certain; "" while a character is incomplete."""

    def finish(self) -> str:
        """What is left at the end: a character that was cut gives one U+FFFD."""


class Tokenizer(Protocol):
    """A tokenizer; every method may be called from any thread.

    Attributes:
        source: which file it was read from, and by which library.
        vocab_size: the largest id it knows, plus one.
        bos_id, eos_id: of the beginning and the end of a text, where the model has them.
        special_tokens: literal -> id of every special token.
        special_ids: the ids of these.
        template_variables: what templates know by name: "bos_token", "eos_token", "unk_token" ...
        bound: how much text one token stands for at most; None where nothing bounds it.
    """

    source: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    special_tokens: Mapping[str, int]
    special_ids: frozenset[int]
    template_variables: Mapping[str, str]
    bound: TokenBound | None

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a prompt. It may take seconds for megabytes: keep it off the event loop (tokenizer/pool.py).

        Args:
            text: lone surrogates in it count as U+FFFD.
            add_special: put the tokens in front that the model wants there (BOS), unless the text begins with
                them; nothing is ever added at the end.
            parse_special: the literal of a special token is that token; else it is plain text.
        """

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """The ids of what a chat template made: nothing is added, special literals count outside `rendered.plain`."""

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of the ids; bytes that are no UTF-8 give U+FFFD, ids that are not known give nothing."""

    def decoder(self, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> TextDecoder:
        """A decoder for the answer to this prompt."""

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, special ones as their literal; U+FFFD where its bytes are cut characters."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; for libraries that decode without bytes those of token_text."""


def without_surrogates(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
