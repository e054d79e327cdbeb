"""The requests reach every path of the classes at hand."""

from __future__ import annotations

from frontend.proof.requests import SHORTEST, beside, longest_window, prompt_length, step_budget
from tests.frontend.proof.examples import DENSE, WINDOWED

WIDE = "grouped-sliding4096-rope10000+moe"


def test_prompts_pass_every_window_and_take_several_steps() -> None:
    assert longest_window([DENSE]) == 0
    assert longest_window([DENSE, WINDOWED, WIDE]) == 4096
    for classes in ([DENSE], [WINDOWED], [WINDOWED, WIDE]):
        length = prompt_length(classes)
        assert length > longest_window(classes)
        assert length >= SHORTEST
        assert length > step_budget(classes) > 1


def test_every_kind_of_sampling_is_asked_for() -> None:
    asked = {each.name: each.params for each in beside(5)}
    assert len(asked) == 9
    assert asked["sampling: greedy"].greedy
    assert asked["sampling: top-k"].top_k
    assert asked["sampling: top-p"].top_p < 1
    assert asked["sampling: min-p"].min_p
    assert asked["sampling: seed"].seed is not None
    assert asked["sampling: log-probabilities"].logprobs
    assert asked["sampling: min_tokens"].min_tokens
    assert asked["sampling: min_tokens"].stop_token_ids == (5,)
