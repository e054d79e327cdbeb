"""What the end of a core means to those who see it."""

from __future__ import annotations

import pytest

from engine_core.ending import exit_status, is_final
from engine_core.wire.client import Fatal, FatalCode


@pytest.mark.parametrize(
    ("code", "status"),
    [("shutdown", 0), ("start_refused", 3), ("protocol", 3), ("executor_died", 4), ("stalled", 4), ("internal", 4)],
)
def test_exit_statuses(code: FatalCode, status: int) -> None:
    assert exit_status(Fatal(code, "")) == status


@pytest.mark.parametrize(
    ("code", "final"),
    [
        ("shutdown", False),
        ("internal", False),
        ("executor_died", True),
        ("stalled", True),
        ("start_refused", True),
        ("protocol", True),
    ],
)
def test_another_core_follows_where_it_may_help(code: FatalCode, final: bool) -> None:
    ending = Fatal(code, "")
    assert is_final(ending, replaceable=True, replacement_failed=False) is final
    assert is_final(ending, replaceable=False, replacement_failed=True)
    assert not is_final(ending, replaceable=True, replacement_failed=True)
