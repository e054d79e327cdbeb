"""Messages of the executor: their bytes, and what older peers may leave out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine_core.wire import executor
from engine_core.wire.codec import Codec
from engine_core.wire.errors import MalformedFrame
from tests.wire.messages import CORE_TO_EXECUTOR, EXECUTOR_TO_CORE, name_of


@pytest.mark.parametrize(
    ("direction", "message", "golden"),
    [
        (
            CORE_TO_EXECUTOR,
            executor.StepPlan(1, 2, [], [executor.Row(0, 4, 1, [[6]], sample=True)]),
            "95a4706c616e01029091950004019191" + "06c3",
        ),
        (EXECUTOR_TO_CORE, executor.StepResult(1, 2, [300], None, 1, 2), "98a6726573756c74010291cd012cc0010200"),
    ],
    ids=name_of,
)
def test_golden_bytes(direction: Codec[Any], message: object, golden: str) -> None:
    """Another build must read these; changing them means another protocol version."""
    assert direction.encode(message).hex() == golden
    assert direction.decode(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(
    "fields",
    [
        ["result", 1, 2, [1.5], None, 1, 2],
        ["result", 1, 2, ["1"], None, 1, 2],
        ["result", 1, 2, [5], [[0.5, [1]]], 1, 2],
        ["result", 1, 2, [5], None, 1],
        ["executor_fatal", "bored", "x"],
        ["executor_ready", 1],
    ],
    ids=lambda fields: f"{fields[0]}-{len(fields)}",
)
def test_values_of_another_kind_are_malformed(fields: list[object]) -> None:
    with pytest.raises(MalformedFrame):
        EXECUTOR_TO_CORE.decode(msgspec.msgpack.encode(fields))


def test_a_plan_of_256_rows_is_small() -> None:
    rows = [executor.Row(slot, 300 + slot, 1, [], sample=True) for slot in range(256)]
    assert len(CORE_TO_EXECUTOR.encode(executor.StepPlan(1, 2, [], rows))) < 3000
