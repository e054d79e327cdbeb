"""Times of one request."""

from __future__ import annotations

import pytest

from bench.answer import Answer


def test_times_are_counted_from_the_sending() -> None:
    answer = Answer(due=1.0, sent=2.0, ended=9.0, arrivals=[3.0, 3.5, 5.0], output_tokens=3)
    assert (answer.ttft, answer.e2el, answer.gaps) == (1.0, 3.0, [0.5, 1.5])
    assert answer.tpot == pytest.approx(1.0)


def test_events_with_several_tokens_count_by_tokens() -> None:
    assert Answer(sent=0.0, arrivals=[1.0, 3.0], output_tokens=5).tpot == pytest.approx(0.5)


def test_an_answer_of_one_token_has_no_time_a_token() -> None:
    assert Answer(sent=0.0, arrivals=[1.0], output_tokens=1).tpot is None


def test_an_answer_without_events_took_no_time() -> None:
    assert (Answer(sent=4.0).ttft, Answer(sent=4.0).e2el) == (0.0, 0.0)
