"""Sampling parameters as they are queued."""

from __future__ import annotations

import pytest

from engine_core.wire.sampling import SamplingParams
from frontend.api import validate
from frontend.errors import ContextTooLong, InvalidRequest
from tests.fakes.core import fake_model

MODEL = fake_model(max_model_len=100)


@pytest.mark.parametrize(
    ("asked", "prompt_len", "limit", "least"),
    [(None, 40, 60, 5), (10, 40, 10, 5), (60, 40, 60, 5), (61, 40, 60, 5), (10, 97, 3, 3)],
)
def test_limits_fit_the_room(asked: int | None, prompt_len: int, limit: int, least: int) -> None:
    fitted = validate.fitted(SamplingParams(max_tokens=asked, min_tokens=5), prompt_len, MODEL)
    assert (fitted.max_tokens, fitted.min_tokens) == (limit, least)


def test_answers_of_a_prompt_have_seeds_of_their_own() -> None:
    params = SamplingParams(seed=7)
    seeds = [validate.nth(params, index).seed for index in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert seeds == [validate.nth(params, index).seed for index in range(100)]
    assert validate.nth(SamplingParams(), 3).seed is None


def test_prompts_that_do_not_fit() -> None:
    validate.check_prompt([0] * 99, MODEL, "prompt")
    with pytest.raises(ContextTooLong):
        validate.check_prompt([0] * 100, MODEL, "prompt")
    for ids in ([], [512], [-1], [0, 512]):
        with pytest.raises(InvalidRequest):
            validate.check_prompt(ids, MODEL, "prompt")


def test_counts_are_bounded() -> None:
    validate.check_counts(validate.MAX_PROMPTS, 1)
    for prompts, n in ((validate.MAX_PROMPTS + 1, 1), (validate.MAX_CHOICES // 128 + 1, 128)):
        with pytest.raises(InvalidRequest, match=str(prompts)):
            validate.check_counts(prompts, n)
