"""How often a lost process may be replaced."""

from __future__ import annotations

from engine_core.wire.budget import RestartBudget


def test_so_many_within_the_window() -> None:
    budget = RestartBudget(2, window_s=10.0)
    assert [budget.take(now) for now in (0.0, 1.0, 2.0, 10.0)] == [True, True, False, False]
    assert budget.used(10.0) == 2
    # The first one is older than the window now.
    assert budget.take(10.5)
    assert not budget.take(10.9)
    assert budget.take(11.5)


def test_what_is_given_back_may_be_taken_again() -> None:
    budget = RestartBudget(2, window_s=10.0)
    budget.give_back(1)
    assert budget.take(0.0)
    assert budget.take(0.1)
    budget.give_back(1)
    assert budget.used(0.2) == 1
    assert budget.take(0.2)
    budget.give_back(7)
    assert budget.used(0.3) == 0


def test_none_at_all() -> None:
    budget = RestartBudget(0)
    assert not budget.take(0.0)
    assert budget.spent() == "--max-restarts is 0"
    assert RestartBudget(3).spent() == "3 restarts in 10 minutes are used up (--max-restarts)"
