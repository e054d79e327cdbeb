from __future__ import annotations

from pathlib import Path

import pytest

from engine_core.wire.config import ModelOptions
from model_executor.errors import LayersRefused
from model_executor.models.reader import read_spec
from model_executor.models.spec import ModelSpec
from model_executor.weights.layer_plan import plan_layers
from tests.fixtures.llama import Shape
from tests.model_executor.engine import write_small


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    """Six layers."""
    return read_spec(write_small(tmp_path, Shape(hidden=32, layers=6, vocab=64)), ModelOptions())


def test_full_is_every_block(spec: ModelSpec) -> None:
    assert plan_layers(spec).sources == (0, 1, 2, 3, 4, 5)
    assert plan_layers(spec) == plan_layers(spec, range(6))


def test_runtime_order_is_the_order_given(spec: ModelSpec) -> None:
    plan = plan_layers(spec, [5, 0, 2])
    assert [layer.source for layer in plan.layers(spec)] == [5, 0, 2]
    assert plan.classes == ("grouped-full-rope10000+gated",) * 3


@pytest.mark.parametrize(
    ("sources", "reason"),
    [([], "at least one"), ([0, 0], "at most once"), ([6], "outside 0 .. 5"), ([-1, 2], r"\[-1\] outside")],
)
def test_choices_refused(spec: ModelSpec, sources: list[int], reason: str) -> None:
    with pytest.raises(LayersRefused, match=reason):
        plan_layers(spec, sources)
