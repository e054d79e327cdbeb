"""What the tools write is read again as it was."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Struct, structs

from tests.frontend.proof.examples import identity, parity, probe, quality, sentinel, step


@pytest.mark.parametrize(
    "report", [parity(), probe(), quality(), sentinel().reference, step("mixed")], ids=lambda each: type(each).__name__
)
def test_round_trip(report: Struct) -> None:
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report


def test_numbers_that_are_narrower_than_the_dtype() -> None:
    plain = identity()
    assert (plain.narrowed, plain.numbers) == (False, "float32")
    kept = structs.replace(plain, kv_cache_dtype="float16")
    assert (kept.narrowed, kept.numbers) == (True, "float32, keys and values in float16")
    int8 = structs.replace(plain, quantization="int8")
    assert (int8.narrowed, int8.numbers) == (True, "float32 with products in int8")


def test_a_kind_of_step_that_does_not_exist_is_refused() -> None:
    text = msgspec.json.encode(step("mixed")).replace(b'"mixed"', b'"other"')
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=type(step("mixed")))
