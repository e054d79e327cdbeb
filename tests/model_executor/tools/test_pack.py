"""The pack is the same everywhere: a change of one token would make every recorded sentinel worthless."""

from __future__ import annotations

import pytest

from model_executor.errors import ToolMisused
from model_executor.tools.pack import LENGTHS, PACK, make_pack


def test_the_pack_never_changes() -> None:
    pack = make_pack(1000, 1000, 24)
    assert [entry.name for entry in pack] == [f"{PACK}/{index}" for index in range(8)]
    assert [len(entry.prompt) for entry in pack] == list(LENGTHS)
    assert pack[0].prompt == [313]
    assert pack[1].prompt == [976, 318, 250, 61, 600, 814, 839]


def test_ids_stay_below_the_vocabulary_and_lengths_below_the_limit() -> None:
    pack = make_pack(5, 40, 24, count=20)
    assert {token for entry in pack for token in entry.prompt} == set(range(5))
    assert max(len(entry.prompt) for entry in pack) == 16
    assert len({tuple(entry.prompt) for entry in pack if len(entry.prompt) > 1}) == sum(
        len(entry.prompt) > 1 for entry in pack
    )


def test_a_longer_pack_begins_with_the_shorter_one() -> None:
    assert make_pack(1000, 1000, 24, count=20)[:8] == make_pack(1000, 1000, 24)


def test_a_model_too_short_for_every_sequence_is_refused() -> None:
    """A pack of no sequences would agree with everything."""
    assert [len(entry.prompt) for entry in make_pack(1000, 13, 12)] == [1]
    with pytest.raises(ToolMisused, match="max_model_len: 12: the shortest sequence of the pack takes 13"):
        make_pack(1000, 12, 12)
