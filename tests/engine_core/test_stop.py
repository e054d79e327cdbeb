"""The end of a request, token by token."""

from __future__ import annotations

import pytest

from engine_core.stop import StopRules
from engine_core.wire.sampling import SamplingParams

EOS = (2, 3)


def rules(params: SamplingParams, *, prompt_len: int = 10, room: int = 100) -> StopRules:
    return StopRules(params, EOS, prompt_len=prompt_len, room=room)


@pytest.mark.parametrize("token", EOS)
def test_every_end_of_sequence_token_stops(token: int) -> None:
    assert rules(SamplingParams()).verdict(token, 11) == "stop"
    assert rules(SamplingParams()).verdict(9, 11) is None


def test_ignore_eos_leaves_stop_ids_alone() -> None:
    ignoring = rules(SamplingParams(ignore_eos=True, stop_token_ids=(3, 8)))
    assert [ignoring.verdict(token, 11) for token in (2, 3, 8)] == [None, "stop", "stop"]


def test_length_counts_from_the_prompt() -> None:
    three = rules(SamplingParams(max_tokens=3))
    assert [three.verdict(9, total) for total in (11, 12, 13)] == [None, None, "length"]


@pytest.mark.parametrize("max_tokens", [None, 91, 1000, 2**31 - 1])
def test_more_than_the_room_means_the_room(max_tokens: int | None) -> None:
    assert rules(SamplingParams(max_tokens=max_tokens)).max_total == 100


def test_a_stop_token_at_the_last_position_is_a_stop() -> None:
    assert rules(SamplingParams(max_tokens=1)).verdict(2, 11) == "stop"


def test_min_tokens_come_first() -> None:
    patient = rules(SamplingParams(min_tokens=3, stop_token_ids=(8,)))
    assert [patient.verdict(8, total) for total in (11, 12, 13)] == [None, None, "stop"]
    assert [patient.verdict(2, total) for total in (11, 12, 13)] == [None, None, "stop"]


def test_length_ends_even_before_min_tokens() -> None:
    assert rules(SamplingParams(min_tokens=50), room=12).verdict(9, 12) == "length"
