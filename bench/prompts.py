"""Prompts of a load: drawn at random with an exact number of tokens, or out of a file of conversations."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.errors import UsageError
from frontend.tokenizer.base import Tokenizer

# Small ids are often special tokens.
FIRST_ID = 100
FEWEST_TOKENS = 4


class Request(Struct, frozen=True):
    """One request.

    Attributes:
        prompt: token ids, or text.
        input_len: tokens of the prompt; 0: unknown before the server counts them.
        output_len: tokens asked for.
    """

    prompt: list[int] | str
    input_len: int
    output_len: int


class Shape(Struct, frozen=True):
    """Sizes of random requests, in tokens.

    Attributes:
        input_len, output_len: of each request; with range_ratio r drawn from the length less and plus its r-th part.
        prefix_len: further tokens that stand before every prompt, the same in all.
        range_ratio: 0 up to 1, not 1 itself.
        vocab: ids are drawn below this.
    """

    input_len: int = 256
    output_len: int = 64
    prefix_len: int = 0
    range_ratio: float = 0.0
    vocab: int = 1000

    def check(self) -> None:
        """Refuse sizes that make no request.

        Raises:
            UsageError: a value is out of its range.
        """
        limits = {"--random-input-len": self.input_len, "--random-output-len": self.output_len, "--vocab": self.vocab}
        for flag, value in limits.items():
            if value < 1:
                raise UsageError(f"{flag}: must be at least 1, is {value}")
        if self.prefix_len < 0:
            raise UsageError(f"--random-prefix-len: must be at least 0, is {self.prefix_len}")
        if not 0 <= self.range_ratio < 1:
            raise UsageError(f"--random-range-ratio: must be from 0 up to 1, is {self.range_ratio:g}")


def random_requests(shape: Shape, count: int, seed: int) -> list[Request]:
    """Requests of random ids; equal for equal arguments, and no two alike but for the common prefix."""
    draw = random.Random(f"prompts {seed}")
    lowest = min(FIRST_ID, shape.vocab // 2)

    def ids(length: int) -> list[int]:
        return [draw.randrange(lowest, shape.vocab) for _ in range(length)]

    def about(length: int) -> int:
        return max(1, draw.randint(round(length * (1 - shape.range_ratio)), round(length * (1 + shape.range_ratio))))

    prefix = ids(shape.prefix_len)
    made = []
    for _ in range(count):
        prompt = [*prefix, *ids(about(shape.input_len))]
        made.append(Request(prompt, len(prompt), about(shape.output_len)))
    return made


def as_text(request: Request, tokenizer: Tokenizer) -> Request:
    """The request with a text for its prompt that the tokenizer reads as exactly as many tokens.

    Raises:
        UsageError: no such text was found.
    """
    assert not isinstance(request.prompt, str)
    ids, wanted = list(request.prompt), request.input_len
    for _ in range(20):
        text = tokenizer.decode(ids)
        read = list(tokenizer.encode(text))
        if len(read) == wanted:
            return Request(text, wanted, request.output_len)
        ids = read[:wanted] + ids[: max(0, wanted - len(read))]
    raise UsageError(f"--random-input-len {wanted}: no text of so many tokens was found with this tokenizer")


class _Turn(Struct):
    value: str


class _Conversation(Struct):
    conversations: list[_Turn] = []


def conversation_requests(
    path: Path, count: int, seed: int, tokenizer: Tokenizer | None, output_len: int | None
) -> list[Request]:
    """Requests from a JSON file of conversations as ShareGPT has them: the first turn asks, the second answers.

    Args:
        path: a list of {"conversations": [{"value": text}, ...]}.
        count: how many; fewer when the file has fewer that serve.
        tokenizer: counts tokens; None: output_len must be given.
        output_len: tokens asked for; None: as many as the file's answer has.

    Raises:
        UsageError: the file cannot be read, or nothing in it serves.
    """
    if tokenizer is None and output_len is None:
        raise UsageError("--dataset-path: lengths of answers need --tokenizer or --sharegpt-output-len")
    try:
        read = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"--dataset-path {path}: {error}") from error
    pairs = [one.conversations for one in read if len(one.conversations) >= 2 and one.conversations[0].value]
    random.Random(f"conversations {seed}").shuffle(pairs)
    made: list[Request] = []
    for asked, answered, *_ in pairs:
        if len(made) == count:
            break
        input_len = 0 if tokenizer is None else len(tokenizer.encode(asked.value))
        wanted = output_len if output_len is not None or tokenizer is None else len(tokenizer.encode(answered.value))
        assert wanted is not None
        if tokenizer is None or min(input_len, wanted) >= FEWEST_TOKENS:
            made.append(Request(asked.value, input_len, wanted))
    if not made:
        raise UsageError(f"--dataset-path {path}: has no conversation of two turns and {FEWEST_TOKENS} tokens each")
    return made


def digest(requests: Sequence[Request]) -> str:
    """Names the data of a run: equal requests, equal digest."""
    return hashlib.sha256(msgspec.json.encode(list(requests))).hexdigest()[:16]
