"""The bytes that a plan tells are those of a real executor, within a hundredth."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import pytest

from model_executor.errors import NoKernel
from model_executor.layers import int8
from model_executor.models.spec import Dtype
from model_executor.native import linear
from model_executor.native.library import load_native
from model_executor.tools.model import open_model
from model_executor.tools.offline import Offline, OfflineOptions
from model_executor.tools.plan import make_report
from model_executor.weights import footprint
from tests.fixtures.families import edit_config
from tests.fixtures.llama import Shape, write_rand
from tests.model_executor.engine import SMALL, write_small
from tests.model_executor.tools.folders import KEPT, write_model

Products = Literal["none", "int8"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
PRODUCTS: tuple[Products, ...] = get_args(Products)


def check(folder: Path, layers: str = "full", dtype: Dtype = "float32", products: Products = "none") -> None:
    """Plan, bring an executor up, and compare."""
    model = open_model(folder)
    made = make_report(model, layers, allow_missing_classes=True, products=products)
    options = OfflineOptions(
        folder,
        layers=layers,
        allow_missing_classes=True,
        dtype=dtype,
        quantization=products,
        device="cpu",
        # The tables of the rotation are as long as the longest sequence.
        length=model.spec.max_model_len,
        sequences=1,
    )
    held = Offline(options).executor.ready.memory["weights"]
    assert abs(made.cpu_bytes[dtype] - held) <= held / 100, (made.cpu_bytes, held)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_dtype_of_run_and_file(
    tmp_path: Path, *, tied: bool, stored: Dtype, dtype: Dtype, products: Products
) -> None:
    """Widths that fill no whole panel, and biases."""
    shape = Shape(
        hidden=64,
        layers=3,
        intermediate=192,
        vocab=300,
        max_position=256,
        tied=tied,
        attention_bias=True,
        mlp_bias=True,
    )
    check(write_rand(tmp_path, shape=shape, dtype=stored), "0,2", dtype, products)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("gate", ["relu", "gelu"])
def test_gates_that_are_left_to_torch(tmp_path: Path, gate: str, products: Products) -> None:
    shape = Shape(hidden=64, layers=3, intermediate=192, vocab=300, max_position=256, mlp_bias=True)
    check(write_rand(tmp_path, shape=shape, dtype="bfloat16", config={"hidden_act": gate}), products=products)


@pytest.mark.parametrize("name", KEPT)
def test_every_family(tmp_path: Path, name: str) -> None:
    check(write_model(tmp_path, name), ",".join(map(str, KEPT[name])))


def test_a_tied_head_that_differs_from_the_embedding(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SMALL)
    untied = make_report(open_model(folder), "full", allow_missing_classes=False)
    edit_config(folder, tie_word_embeddings=True)
    assert make_report(open_model(folder), "full", allow_missing_classes=False).cpu_bytes == untied.cpu_bytes
    check(folder)


def test_weights_that_are_drawn(tmp_path: Path) -> None:
    """In float32, whatever the checkpoint would be stored in."""
    folder = write_small(tmp_path, SMALL, torch_dtype="bfloat16")
    stored = make_report(open_model(folder), "full", allow_missing_classes=False)
    (folder / "model.safetensors").unlink()
    assert make_report(open_model(folder), "full", allow_missing_classes=False).cpu_bytes == stored.cpu_bytes


def test_files_that_are_not_there_are_as_the_configuration_says(tmp_path: Path) -> None:
    folder = write_rand(tmp_path, shape=Shape(layers=2), dtype="bfloat16", shards=9)
    there = make_report(open_model(folder), "full", allow_missing_classes=False)
    for path in sorted(folder.glob("*.safetensors"))[::2]:
        path.unlink()
    assert make_report(open_model(folder), "full", allow_missing_classes=False).cpu_bytes == there.cpu_bytes


def test_widths_that_int8_does_not_take_are_refused(tmp_path: Path) -> None:
    """As the server refuses them."""
    folder = write_small(tmp_path, SMALL)
    with pytest.raises(NoKernel, match=r"blocks\.0\..*weight in int8: .*inputs 32: multiples of 64"):
        make_report(open_model(folder), "full", allow_missing_classes=False, products="int8")
    with pytest.raises(NoKernel):
        Offline(OfflineOptions(folder, quantization="int8", device="cpu"))


def test_the_numbers_are_those_of_the_kernels() -> None:
    assert footprint.PANEL == linear.PANEL
    assert {None, *footprint.GATES} == set(linear.FINISH)
    assert (footprint.TURNED, footprint.MAX_GROUP) == (int8.TURNED, int8.MAX_GROUP)
    native = load_native(1)
    for inputs in (64, 128, 192, 320, 448, 576, 1536, 8960):
        for outputs in (1, 32, 33, 1000):
            assert footprint.int8_bytes(inputs, outputs) == native.int8_bytes(inputs, outputs)


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("dtype", "products"),
    [("float32", "none"), ("bfloat16", "none"), ("float16", "none"), ("float32", "int8"), ("bfloat16", "int8")],
)
def test_three_blocks_of_the_default_model(default_model: Path, dtype: Dtype, products: Products) -> None:
    check(default_model, "0,7,29", dtype, products)
