from __future__ import annotations

from pathlib import Path

import pytest

from model_executor.models.registry import family
from model_executor.weights.layer_plan import plan_layers
from model_executor.weights.parameters import block_parameters, outer_parameters
from tests.fixtures.llama import Shape, parameter_shapes
from tests.model_executor.engine import build, write_small

SHAPES = [
    Shape(hidden=32, layers=3, vocab=64),
    Shape(hidden=32, layers=3, vocab=64, tied=True, attention_bias=True, mlp_bias=True, head_dim=16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layers", [None, [2, 0]], ids=str)
def test_parameters_are_those_of_the_model(tmp_path: Path, shape: Shape, layers: list[int] | None) -> None:
    """What the torch-free table says and what the decoder builds are one."""
    spec, model = build(write_small(tmp_path, shape), layers)
    names = family(spec.architecture).names
    table = (*outer_parameters(spec, names), *block_parameters(spec, plan_layers(spec, layers), names))
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {parameter.name: parameter.shape for parameter in table} == built
    assert len(table) == len(built)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sources_are_those_of_the_checkpoint(tmp_path: Path, shape: Shape) -> None:
    spec, _ = build(write_small(tmp_path, shape))
    names = family(spec.architecture).names
    table = (*outer_parameters(spec, names), *block_parameters(spec, plan_layers(spec), names))
    sources = {source.name: source.shape for parameter in table for source in parameter.sources}
    assert sources == parameter_shapes(shape)
