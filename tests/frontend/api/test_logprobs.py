"""Log-probabilities stay JSON, and tokens that look alike stay apart."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from engine_core.wire.client import TokenLogprobs
from frontend.api.logprobs import LOWEST, chat_logprobs, completion_logprobs
from frontend.tokenizer.load import load_tokenizer


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_no_infinity(chain_folder: Path, value: float) -> None:
    tokenizer = load_tokenizer(chain_folder)
    entries = [TokenLogprobs(value, [97, 98], [-0.5, value])]
    completion = completion_logprobs(tokenizer, [98], [0], entries)
    assert completion.token_logprobs == [LOWEST]
    assert completion.top_logprobs == [{"a": -0.5, "b": LOWEST}]
    chat = chat_logprobs(tokenizer, [98], entries)
    assert chat.content[0].logprob == LOWEST
    assert b"null" not in msgspec.json.encode(chat.content)


def test_bytes_that_are_no_characters_have_names_of_their_own(chain_folder: Path) -> None:
    tokenizer = load_tokenizer(chain_folder)
    entries = [TokenLogprobs(-3.0, [0xE4, 0xE5, 97], [-0.5, -1.0, -2.0])]
    (top,) = completion_logprobs(tokenizer, [0xF0], [0], entries).top_logprobs
    assert top == {"bytes:\\xe4": -0.5, "bytes:\\xe5": -1.0, "a": -2.0, "bytes:\\xf0": -3.0}
