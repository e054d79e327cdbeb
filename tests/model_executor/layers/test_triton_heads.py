"""Norm of heads, rotation and append in Triton's interpreter against the same steps in torch, one after the other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from model_executor.attention.dispatch import HEADS, Chooser, KernelTable
from model_executor.kv_cache import LayerCache
from model_executor.layers.triton_heads import SPEC, TritonHeads
from model_executor.models.spec import NormSpec
from tests.gpu.layer_cases import BLOCK_SIZE, HEADS_SHAPES, HeadsCase, HeadsShape, build_heads
from tests.gpu.rounding import unlike
from tests.model_executor import interpreted  # noqa: F401 - before the kernels are made

CPU = torch.device("cpu")
FULL = HeadsShape(4, 2, 32, torch.bfloat16, rotary=32, norm=NormSpec(1e-6))


def run(case: HeadsCase, cache: LayerCache) -> torch.Tensor:
    kernel = TritonHeads(case.problem)
    return kernel.forward(case.projected, case.rotation, case.layer.qk_norm, cache, case.batch)


def differences(case: HeadsCase) -> list[str | None]:
    """Of queries, keys and values."""
    ours, theirs = case.cache(), case.cache()
    pairs = [(run(case, ours), case.separate(theirs)), (ours.key, theirs.key), (ours.value, theirs.value)]
    return [unlike(mine, other) for mine, other in pairs]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("shape", HEADS_SHAPES, ids=str)
def test_equals_the_steps_one_after_the_other(shape: HeadsShape, tokens: int) -> None:
    assert differences(build_heads(shape, tokens, CPU, seed=tokens)) == [None] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_without_a_norm_every_bit_is_equal(dtype: torch.dtype) -> None:
    """The rotation rounds products and sum, each by itself."""
    case = build_heads(HeadsShape(4, 2, 64, dtype, rotary=48), 9, CPU, seed=0)
    ours, theirs = case.cache(), case.cache()
    assert torch.equal(run(case, ours), case.separate(theirs))
    assert torch.equal(ours.key, theirs.key)
    assert torch.equal(ours.value, theirs.value)


@pytest.mark.parametrize("kept", [None, torch.float16])
@pytest.mark.parametrize("norm", [None, NormSpec(1e-6), NormSpec(1e-6, offset=True)])
def test_what_is_not_finite_is_kept_finite(norm: NormSpec | None, kept: torch.dtype | None) -> None:
    shape = dataclasses.replace(FULL, norm=norm, kept=kept)
    case = build_heads(shape, 12, CPU, seed=1, broken=True)
    assert not case.projected.isfinite().all()
    with np.errstate(invalid="ignore"):
        assert differences(case) == [None] * 3
        cache = case.cache()
        run(case, cache)
    assert cache.key.isfinite().all()
    assert cache.value.isfinite().all()


def test_what_the_cache_cannot_hold_becomes_its_largest() -> None:
    shape = HeadsShape(2, 1, 16, torch.float32, kept=torch.float16)
    case = build_heads(shape, 3, CPU, seed=2)
    case.projected[1] *= 1e6
    assert differences(case) == [None] * 3


def test_negative_slots_keep_nothing_and_have_queries() -> None:
    case = build_heads(FULL, 3, CPU, seed=3)
    whole, cache = case.cache(), case.cache()
    queries = run(case, whole)
    slots = torch.tensor([-1, int(case.batch.slot_mapping[1]), -5])
    skipped = dataclasses.replace(case, batch=dataclasses.replace(case.batch, slot_mapping=slots))
    assert torch.equal(run(skipped, cache), queries)
    for kept, full in zip(cache.slots(), whole.slots(), strict=True):
        assert torch.equal(kept[slots[1]], full[slots[1]])
        kept[slots[1]] = 0
        assert (kept == 0).all()


def test_the_projection_stays() -> None:
    case = build_heads(FULL, 4, CPU, seed=4)
    before = case.projected.clone()
    run(case, case.cache())
    assert torch.equal(case.projected, before)


def test_no_tokens_is_no_launch() -> None:
    case = build_heads(FULL, 1, CPU, seed=5)
    cache = case.cache()
    none = dataclasses.replace(case, projected=case.projected[:0])
    assert run(none, cache).shape == (0, 4, 32)
    assert (cache.key == 0).all()


def test_the_choice_and_its_reasons() -> None:
    here = FULL.problem("cpu")
    on_gpu = dataclasses.replace(here, device="cuda")
    assert HEADS[0] is SPEC
    assert SPEC.reject(on_gpu) == ()
    assert SPEC.reject(here) == ("device cpu: runs on cuda",)
    assert SPEC.reject(dataclasses.replace(on_gpu, head_dim=1025)) == ("head_dim 1025: takes up to 1024",)
    assert "float64" in SPEC.reject(dataclasses.replace(on_gpu, dtype=torch.float64))[0]
    table = KernelTable()
    spec = build_heads(FULL, 1, CPU, seed=0).layer.spec
    assert Chooser(table, torch.bfloat16, CPU, BLOCK_SIZE)(spec).heads is None
    assert table.explain()[0].candidates[0].reasons == ["device cpu: runs on cuda"]


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert SPEC.reject(FULL.problem("cuda")) == ("package triton: not installed",)
