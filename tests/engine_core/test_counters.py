"""The scheduler's part of the status."""

from __future__ import annotations

import msgspec

from engine_core.counters import Counters, SchedulerStatus
from engine_core.wire.client import Status
from tests.engine_core.test_sequence import make_sequence


def test_the_fields_are_those_of_the_wire() -> None:
    wire = {field.name: field.type for field in msgspec.structs.fields(Status)}
    own = {field.name: field.type for field in msgspec.structs.fields(SchedulerStatus)}
    assert own == {name: wire[name] for name in own}


def test_a_request_counts_when_it_first_starts() -> None:
    counters, seq = Counters(), make_sequence(9)
    seq.start(0, 8, 1.0)
    counters.note_start(seq, 8, first=True, caching=True)
    counters.note_start(seq, 4, first=False, caching=True)
    assert (counters.starts, counters.prompt_tokens, counters.cached_tokens) == (2, 9, 8)
    assert (counters.prefix_queries, counters.prefix_hits) == (9, 8)


def test_without_a_cache_nothing_was_looked_up() -> None:
    counters = Counters()
    counters.note_start(make_sequence(9), 0, first=True, caching=False)
    assert counters.prefix_queries == 0
