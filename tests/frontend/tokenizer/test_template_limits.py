"""What a rendering may spend."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.tokenizer.template_limits import (
    MAX_CHARACTERS,
    MAX_STEPS,
    STEPS_PER_CLOCK,
    Budget,
    LimitPassed,
    check_join,
    check_operation,
    check_size,
    check_text_call,
)


def test_steps() -> None:
    budget = Budget(lambda: 0.0)
    for _ in range(MAX_STEPS):
        budget.step()
    with pytest.raises(LimitPassed, match=f"{MAX_STEPS} steps"):
        budget.step()


def test_time_is_looked_at_now_and_then() -> None:
    times = iter([0.0, 0.9, 1.1])
    budget = Budget(lambda: next(times))
    for _ in range(2 * STEPS_PER_CLOCK - 1):
        budget.step()
    with pytest.raises(LimitPassed, match="1 s"):
        budget.step()


def test_sizes() -> None:
    check_size(MAX_CHARACTERS)
    with pytest.raises(LimitPassed, match="characters"):
        check_size(MAX_CHARACTERS + 1)
    with pytest.raises(LimitPassed, match="more than 5 bits"):
        check_size(6, 5, "bits")


@pytest.mark.parametrize(
    ("operator", "left", "right"),
    [("*", 3, 10**12), ("*", "ab", -5), ("+", 10**12, 1), ("**", 2.0, 10**3), ("%", 10**12, 7), ("%", "%s%%", "x")],
)
def test_harmless_operations(operator: str, left: Any, right: Any) -> None:
    check_operation(operator, left, right)


@pytest.mark.parametrize(
    ("operator", "left", "right"),
    [("*", "ab", 10**9), ("*", 10**9, [1]), ("**", 3, 10**6), ("+", "a" * 2**26, "b"), ("%", "%99999999d", 1)],
)
def test_huge_operations(operator: str, left: Any, right: Any) -> None:
    with pytest.raises(LimitPassed):
        check_operation(operator, left, right)


@pytest.mark.parametrize("name", ["center", "zfill", "indent", "anything"])
def test_widths(name: str) -> None:
    check_text_call(name, "a", [80], {})
    with pytest.raises(LimitPassed):
        check_text_call(name, "a", [], {"width": 10**9})


def test_numbers_in_plain_text_are_no_widths() -> None:
    check_text_call("format", "call 0123456789 {}", ["x"], {})


def test_joins() -> None:
    check_join(", ", ["a", 1, None])
    check_join(", ", (part for part in "ab"))
    with pytest.raises(LimitPassed):
        check_join("a" * 2**20, ["b"] * 100)
