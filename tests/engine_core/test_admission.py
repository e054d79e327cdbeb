"""What is refused at once, and with which numbers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.admission import Limits, Refusal, Tokens, examine
from engine_core.wire.client import Submit
from engine_core.wire.codec import pack_ids
from engine_core.wire.executor import KvGroup
from engine_core.wire.sampling import SamplingParams

LIMITS = Limits(
    max_model_len=20,
    vocab_size=50,
    kv_groups=(KvGroup(None, 100),),
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    eos_token_ids=(2,),
)


def submit(prompt: list[int], params: SamplingParams | None = None, output: list[int] | None = None) -> Submit:
    return Submit("r", pack_ids(prompt), params or SamplingParams(), output=pack_ids(output or []))


def refusal(request: Submit, limits: Limits = LIMITS) -> Refusal:
    found = examine(request, limits)
    assert isinstance(found, Refusal)
    assert found.field is None or found.field in found.message
    return found


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    found = examine(submit([1] * 19), LIMITS)
    assert isinstance(found, Tokens)
    assert (len(found.ids), found.prompt_len) == (19, 19)
    refused = refusal(submit([1] * 20))
    assert (refused.code, refused.limit, refused.given) == ("context_length", 19, 20)
    assert "20" in refused.message


def test_earlier_output_counts() -> None:
    found = examine(submit([1] * 5, output=[3, 4]), LIMITS)
    assert isinstance(found, Tokens)
    assert (found.ids.tolist(), found.prompt_len) == ([1] * 5 + [3, 4], 5)
    assert refusal(submit([1] * 10, output=[1] * 10)).code == "context_length"
    spent = refusal(submit([1], SamplingParams(max_tokens=2), [3, 4]))
    assert (spent.code, spent.field, spent.limit, spent.given) == ("invalid", "max_tokens", 3, 2)


def test_a_prompt_larger_than_the_pool_never_fits() -> None:
    small = msgspec.structs.replace(LIMITS, kv_groups=(KvGroup(None, 2),))
    assert isinstance(examine(submit([1] * 7), small), Tokens)
    refused = refusal(submit([1] * 8), small)
    assert (refused.code, refused.limit, refused.given) == ("never_fits", 7, 8)
    assert small.room == 8


def test_a_window_that_goes_on_for_ever_bounds_nothing() -> None:
    """Three blocks hold a window of 6 and two plans; two do not."""
    endless = msgspec.structs.replace(LIMITS, kv_groups=(KvGroup(None, 5), KvGroup(6, 3)))
    assert (endless.pool_tokens, endless.room, endless.held_tokens, endless.num_kv_blocks) == (20, 20, 20, 8)
    small = msgspec.structs.replace(LIMITS, kv_groups=(KvGroup(6, 2), KvGroup(9, 90)))
    assert small.room == 8
    refused = refusal(submit([1] * 8), small)
    assert (refused.code, refused.limit, refused.given) == ("never_fits", 7, 8)
    assert "2 blocks of 4 tokens" in refused.message
    windows = msgspec.structs.replace(LIMITS, kv_groups=(KvGroup(6, 3),))
    assert (windows.room, windows.held_tokens) == (20, 4 * 20)


@pytest.mark.parametrize(
    ("request_", "field", "given"),
    [
        (submit([]), "prompt", 0),
        (submit([1, 50]), "prompt", 50),
        (submit([1, -1]), "prompt", -1),
        (submit([1], output=[50]), "output", 50),
        (submit([1], SamplingParams(stop_token_ids=(3, 50))), "stop_token_ids", 50),
        (submit([1], SamplingParams(max_tokens=0)), "max_tokens", 0),
        (submit([1], SamplingParams(max_tokens=3, min_tokens=4)), "min_tokens", 4),
    ],
)
def test_values_out_of_range(request_: Submit, field: str, given: int) -> None:
    refused = refusal(request_)
    assert (refused.code, refused.field, refused.given) == ("invalid", field, given)
    assert refused.limit is not None


def test_bytes_that_are_no_ids() -> None:
    refused = refusal(Submit("r", b"\x01\x00\x00", SamplingParams()))
    assert (refused.code, refused.field) == ("invalid", "prompt")


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_any_bytes_get_an_answer(prompt: bytes, output: bytes) -> None:
    found = examine(Submit("r", prompt, SamplingParams(), output=output), LIMITS)
    if isinstance(found, Tokens):
        assert 1 <= found.prompt_len <= len(found.ids) < LIMITS.room
        assert all(0 <= token < LIMITS.vocab_size for token in found.ids)
