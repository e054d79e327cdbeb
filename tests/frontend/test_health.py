"""The state of the server, for every sign of trouble and for several at once."""

from __future__ import annotations

import pytest

from engine_core.wire.client import EngineState
from frontend.health import SILENT_S, STOPPED_S, TAKING, Signs, judge

WELL = {"was_ready": True, "engine": "ready", "reason": ""}


@pytest.mark.parametrize(
    ("signs", "state", "words"),
    [
        ({}, "loading", "the engine core starts"),
        ({"engine": "loading", "reason": "load 3 of 10"}, "loading", "load 3 of 10"),
        ({"lost": "signal 9"}, "loading", "signal 9; another core starts"),
        (WELL, "ready", ""),
        (WELL | {"silent_s": SILENT_S, "stopped_s": STOPPED_S}, "ready", ""),
        (WELL | {"silent_s": SILENT_S + 0.5}, "stalled", "said nothing for 3.5 s"),
        (WELL | {"stopped_s": STOPPED_S + 0.5}, "stalled", "stopped by a signal for 1.5 s"),
        (WELL | {"engine": "stalled", "reason": "executor stopped"}, "stalled", "executor stopped"),
        (WELL | {"engine": "recovering", "reason": "executor died"}, "recovering", "executor died"),
        (WELL | {"lost": "signal 9"}, "recovering", "signal 9; another core starts"),
        (WELL | {"lost": "x", "engine": "stalled", "silent_s": 99.0}, "recovering", "x; another core starts"),
        (WELL | {"draining": True, "lost": "x", "engine": "stalled"}, "draining", "shutting down"),
        ({"draining": True}, "draining", "shutting down"),
        (WELL | {"engine": "draining", "reason": "draining"}, "draining", "draining"),
        (WELL | {"dead": "3 restarts used up", "draining": True, "lost": "x"}, "dead", "3 restarts used up"),
    ],
)
def test_states(signs: dict[str, object], state: EngineState, words: str) -> None:
    found, reason = judge(Signs(**signs))  # type: ignore[arg-type]
    assert found == state
    assert words in reason
    assert bool(reason) == (state != "ready")


def test_requests_are_taken_where_they_will_be_answered() -> None:
    assert set(TAKING) == {"ready", "recovering", "stalled"}
