"""Reports are plain data: as a file for people, as a message, and when a newer version adds to them."""

from __future__ import annotations

import typing

import msgspec
import pytest

from engine_core.wire.reports import KernelChoice, LoadReport, Phase, TensorRecord, TensorState, page_cache_state
from tests.wire.messages import KERNELS, LOAD


def test_reports_are_json_that_reads_back() -> None:
    assert msgspec.json.decode(msgspec.json.encode(LOAD), type=LoadReport) == LOAD
    assert msgspec.json.decode(msgspec.json.encode(KERNELS), type=list[KernelChoice]) == KERNELS


def test_a_newer_report_may_say_more() -> None:
    said = {**msgspec.to_builtins(LOAD), "weather": "fine"}
    assert msgspec.convert(said, LoadReport) == LOAD


def test_a_tensor_needs_name_and_state_alone() -> None:
    record = msgspec.convert({"name": "w", "state": "generated"}, TensorRecord)
    assert record == TensorRecord("w", "generated", [], "", 0, "", "", "")
    record.sources.append("x")
    assert TensorRecord("w", "generated").sources == []


@pytest.mark.parametrize("state", typing.get_args(TensorState))
def test_every_state_is_read(state: TensorState) -> None:
    assert msgspec.convert({"name": "w", "state": state}, TensorRecord).state == state


def test_an_unknown_state_or_phase_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="state"):
        msgspec.convert({"name": "w", "state": "lost"}, TensorRecord)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert("dance", Phase)


@pytest.mark.parametrize(
    ("share", "state"),
    [(None, "unknown"), (0.0, "cold"), (0.05, "partly"), (0.95, "partly"), (0.951, "warm"), (1.0, "warm")],
)
def test_cold_and_warm_are_told_apart(share: float | None, state: str) -> None:
    assert page_cache_state(share) == state
