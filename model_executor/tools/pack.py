"""A pack of token sequences that is the same on every machine: named, and made from its name alone."""

from __future__ import annotations

import hashlib
from typing import Final

from engine_core.wire.evidence import PackEntry
from model_executor.errors import ToolMisused

PACK: Final = "tercet-1"
# One token, odd lengths, both sides of a block border of 16 tokens, several blocks.
LENGTHS: Final = (1, 7, 15, 16, 17, 33, 48, 70)


def make_pack(vocab_size: int, max_model_len: int, answer: int, count: int = len(LENGTHS)) -> list[PackEntry]:
    """The first `count` sequences, those apart that are too long; lengths repeat, tokens do not.

    Args:
        vocab_size: ids are drawn below it.
        max_model_len: tokens of a sequence and its answer.
        answer: tokens of an answer.
        count: at least 1.

    Raises:
        ToolMisused: no sequence is short enough.
    """
    longest = max_model_len - answer
    if longest < min(LENGTHS):
        raise ToolMisused(
            f"max_model_len: {max_model_len}: the shortest sequence of the pack takes {min(LENGTHS) + answer}"
        )
    entries = []
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        if length > longest:
            continue
        prompt = [_draw(f"{PACK}:{index}:{place}", vocab_size) for place in range(length)]
        entries.append(PackEntry(f"{PACK}/{index}", prompt))
    return entries


def _draw(key: str, below: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") % below
