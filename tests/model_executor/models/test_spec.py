from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec import structs

from model_executor.models.spec import (
    AttentionSpec,
    Dtype,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    resolve_dtype,
)

ROPE = RopeSpec("default", 10000.0, 8, 64)
LAYER = LayerSpec(0, AttentionSpec(4, 2, 8, 0.25, ROPE), MlpSpec(48, "silu"), NormSpec(1e-6))


def model(dtype: Dtype | None) -> ModelSpec:
    """A model whose checkpoint has this dtype."""
    return ModelSpec("LlamaForCausalLM", 32, 64, 64, False, NormSpec(1e-6), dtype, (LAYER,))


def test_resolve_dtype() -> None:
    told, silent = model("bfloat16"), model(None)
    assert resolve_dtype("auto", told, "cpu") == "float32"
    assert resolve_dtype("auto", told, "cuda") == "bfloat16"
    assert resolve_dtype("auto", silent, "cuda", "float16") == "float16"
    assert resolve_dtype("auto", silent, "cuda") == "float32"
    assert resolve_dtype("float16", told, "cpu") == "float16"


def with_attention(**fields: object) -> LayerSpec:
    return structs.replace(LAYER, attention=structs.replace(LAYER.attention, **fields))


def test_blocks_of_one_class_differ_in_weights_only() -> None:
    assert structs.replace(LAYER, source=7).class_name == LAYER.class_name == "grouped-full-rope10000+gated"


def test_blocks_that_compute_otherwise_are_of_other_classes() -> None:
    """Window, base, scaling and kind each make a class of their own."""
    others = [
        with_attention(window=5),
        with_attention(window=6),
        with_attention(rope=None),
        with_attention(rope=structs.replace(ROPE, theta=1e6)),
        with_attention(rope=structs.replace(ROPE, theta=1000001.0)),
        with_attention(rope=structs.replace(ROPE, kind="linear", factor=8.0)),
        with_attention(rope=structs.replace(ROPE, kind="linear", factor=4.0)),
        with_attention(kind="mla"),
        structs.replace(LAYER, mlp=structs.replace(LAYER.mlp, kind="moe")),
    ]
    names = [layer.class_name for layer in (LAYER, *others)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("module", ["spec", "config", "layer_types"])
def test_what_readers_stand_on_imports_no_reader(module: str) -> None:
    code = (
        f"import sys, model_executor.models.{module}; print(*sorted(n for n in sys.modules if 'model_executor' in n))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"model_executor.models.registry", "model_executor.models.reader"}
    assert not any(name.startswith("model_executor.weights") for name in loaded)


def test_no_reader_needs_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import model_executor.models.reader, model_executor.weights.plan\n"
        "from model_executor.models.registry import ARCHITECTURES, family\n"
        "for architecture in ARCHITECTURES: family(architecture)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
