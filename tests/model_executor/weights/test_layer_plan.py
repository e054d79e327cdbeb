from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from engine_core.wire.config import ModelOptions
from model_executor.errors import LayersRefused
from model_executor.models.reader import read_spec
from model_executor.models.spec import ModelSpec
from model_executor.weights.layer_plan import block_classes, choose_layers, compact, plan_layers
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


def chosen(spec: ModelSpec, layers: str, *, leave: bool = False) -> tuple[int, ...]:
    """The sources that `--layers` gives."""
    return choose_layers(spec, ModelOptions(layers=layers, allow_missing_classes=leave)).sources


def mixed(spec: ModelSpec) -> ModelSpec:
    """Blocks 0, 1, 4, 5 of one class, 2 and 3 of another."""
    sliding = [structs.replace(layer.attention, window=8) for layer in spec.layers]
    layers = [
        structs.replace(layer, attention=sliding[layer.source]) if layer.source in (2, 3) else layer
        for layer in spec.layers
    ]
    return structs.replace(spec, layers=tuple(layers))


def sharing(spec: ModelSpec, **needs: tuple[int, ...]) -> ModelSpec:
    """Blocks that read the state of others: b4=(1,)."""
    layers = [structs.replace(layer, needs=needs.get(f"b{layer.source}", ())) for layer in spec.layers]
    return structs.replace(spec, layers=tuple(layers))


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("full", (0, 1, 2, 3, 4, 5)),
        ("first:1", (0,)),
        ("first:6", (0, 1, 2, 3, 4, 5)),
        ("cover", (0,)),
        ("0,3,4-5", (0, 3, 4, 5)),
        ("2", (2,)),
        ("1, 3", (1, 3)),
        ("3-3", (3,)),
    ],
)
def test_forms(spec: ModelSpec, text: str, sources: tuple[int, ...]) -> None:
    assert chosen(spec, text) == sources


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is no block"),
        ("all", "'all' is no block; possible are full, cover, first:N"),
        ("first:0", "1 to 6 are possible"),
        ("first:7", "the model has 6 blocks"),
        ("0,0", "block 0 stands twice"),
        ("0-3,3", "block 3 stands twice"),
        ("3,1", "block 1 follows block 3"),
        ("0-3,2", "block 2 follows block 3"),
        ("4-2", "4-2 runs backwards"),
        ("6", r"block 6 is outside 0 .. 5"),
        ("0-999999999", "block 999999999 is outside"),
        ("-1", "'-1' is no block"),
        ("0,,2", "'' is no block"),
        ("1.5", "'1.5' is no block"),
        ("\u0661", "is no block"),
    ],
)
def test_forms_refused_by_name(spec: ModelSpec, text: str, reason: str) -> None:
    with pytest.raises(LayersRefused, match=reason) as caught:
        chosen(spec, text)
    assert str(caught.value).startswith(f"layers: {text}: ")


def test_cover_is_the_first_of_each_class(spec: ModelSpec) -> None:
    model = mixed(spec)
    assert [each.sources for each in block_classes(model)] == [(0, 1, 4, 5), (2, 3)]
    assert chosen(model, "cover") == (0, 2)


def test_a_class_left_out_needs_leave(spec: ModelSpec) -> None:
    model = mixed(spec)
    assert chosen(model, "1,3") == (1, 3)
    with pytest.raises(LayersRefused, match=r"no block of .*sliding8.* \(blocks 2-3\) is chosen; cover would be 0,2"):
        chosen(model, "first:2")
    assert chosen(model, "first:2", leave=True) == (0, 1)


def test_classes_of_one_name_are_told_apart(spec: ModelSpec) -> None:
    odd = structs.replace(spec.layers[5], norm=structs.replace(spec.layers[5].norm, eps=0.5))
    names = [each.name for each in block_classes(structs.replace(spec, layers=(*spec.layers[:5], odd)))]
    assert names == [spec.layers[0].class_name, f"{spec.layers[0].class_name}#2"]


def test_blocks_that_are_needed(spec: ModelSpec) -> None:
    model = sharing(spec, b4=(1,), b5=(1, 2))
    with pytest.raises(LayersRefused, match=r"not chosen: 1 \(for 4\), 1 \(for 5\), 2 \(for 5\)"):
        chosen(model, "0,4,5")
    assert chosen(model, "1,4") == (1, 4)
    assert chosen(model, "cover") == (0, 1, 4)


def test_cover_follows_needs_to_their_end(spec: ModelSpec) -> None:
    assert chosen(sharing(spec, b1=(3,), b3=(5,)), "cover") == (0, 1, 3, 5)


@pytest.mark.parametrize("text", ["0", "0,2", "0-1", "0,3,7-9", "1-3,5-6"])
def test_compact_is_what_the_option_takes(text: str) -> None:
    spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
    assert compact(index for span in spans for index in range(span[0], span[-1] + 1)) == text
