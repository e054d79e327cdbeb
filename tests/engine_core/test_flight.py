"""Plans that are out, and the fence behind them."""

from __future__ import annotations

import pytest

from engine_core.errors import ResultMismatch, StaleResult
from engine_core.flight import Draft, Fence, Flights, Held
from engine_core.kv_group import Holding
from engine_core.sequence import Sequence
from engine_core.wire.client import TokenLogprobs
from engine_core.wire.executor import StepResult
from tests.engine_core.test_sequence import running_sequence


def result(
    step: int, tokens: list[int], *, epoch: int = 3, logprobs: list[TokenLogprobs | None] | None = None
) -> StepResult:
    return StepResult(epoch, step, tokens, logprobs, 0, 1)


def launched(flights: Flights, counts: list[int]) -> Sequence:
    seq = running_sequence()
    for count in counts:
        draft = Draft(flights.next_step(), 10)
        draft.add(seq, count, [])
        flights.launch(draft.rows)
    return seq


def test_a_draft_counts_its_budget_down() -> None:
    seq, draft = running_sequence(), Draft(1, 10)
    draft.add(seq, 3, [[7]])
    assert draft.budget == 7
    row = draft.rows[0][1]
    assert (row.slot, row.start, row.count, row.blocks, row.sample) == (0, 0, 3, [[7]], False)


def test_plans_come_back_in_order() -> None:
    flights = Flights(3, 100)
    launched(flights, [5, 1])
    with pytest.raises(StaleResult, match="step 2, awaited 1"):
        flights.land(result(2, [4]))
    assert flights.land(result(1, [4])).step == 1
    assert flights.land(result(2, [4])).step == 2
    with pytest.raises(StaleResult, match="step 2, awaited none"):
        flights.land(result(2, [4]))


def test_another_epoch_is_stale() -> None:
    flights = Flights(3, 100)
    launched(flights, [5])
    with pytest.raises(StaleResult, match="epoch 2, awaited 3"):
        flights.land(result(1, [4], epoch=2))
    assert len(flights) == 1


@pytest.mark.parametrize(
    ("tokens", "logprobs", "text"),
    [
        ([], None, "token_ids: 0, expected 1"),
        ([1, 2], None, "token_ids: 2, expected 1"),
        ([100], None, "token_ids: 100, expected 100"),
        ([-1], None, "token_ids: -1, expected 100"),
        ([1], [], "logprobs: 0, expected 1"),
    ],
)
def test_a_result_must_fit_its_plan(tokens: list[int], logprobs: list[TokenLogprobs | None] | None, text: str) -> None:
    flights = Flights(3, 100)
    launched(flights, [5])
    with pytest.raises(ResultMismatch, match=text):
        flights.land(result(1, tokens, logprobs=logprobs))
    assert len(flights) == 1


def test_what_sequences_believe_is_compared_with_what_is_out() -> None:
    flights = Flights(3, 100)
    seq = launched(flights, [5, 1])
    assert flights.violations([seq]) == []
    seq.land(5, sample=True)
    assert flights.violations([seq]) == ["request r1: 1 plans and 1 tokens in flight by its own count, 2 and 2 are out"]


def test_the_fence_keeps_until_its_step() -> None:
    fence = Fence(1)
    first, second = Held([Holding([1, 2])], 0, (2,)), Held([Holding([3])], 1, (1,))
    fence.hold(5, first)
    fence.hold(6, second)
    assert (fence.gain, len(fence), list(fence)) == ([3], 2, [first, second])
    assert fence.lift(4) == []
    assert fence.lift(5) == [first]
    assert (fence.gain, len(fence)) == ([1], 1)
    assert fence.lift(6) == [second]
    assert not fence
