from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_executor.attention import torch_ref, torch_sdpa
from model_executor.attention.dispatch import ATTENTION, Chooser, KernelTable
from model_executor.attention.spec import KernelSpec, Limits
from model_executor.errors import NoKernel
from model_executor.models.spec import AttentionSpec
from tests.model_executor.paged import make_problem


def test_the_first_that_fits_is_taken_and_the_choice_explained() -> None:
    table = KernelTable(attention=(torch_sdpa.SPEC, torch_ref.SPEC))
    assert isinstance(table.attention(make_problem()), torch_sdpa.TorchSdpa)
    assert isinstance(table.attention(make_problem(soft_cap=30.0)), torch_ref.TorchReference)
    plain, capped = table.explain()
    assert (plain.operator, plain.chosen) == ("attention", "torch_sdpa")
    assert plain.candidates[0].reasons == []
    assert capped.chosen == "torch_ref"
    assert capped.candidates[0].reasons == ["soft_cap 30: has no soft cap"]
    assert "soft cap 30" in capped.problem


def test_equal_problems_share_a_kernel_and_one_line() -> None:
    table = KernelTable()
    assert table.attention(make_problem()) is table.attention(make_problem())
    assert table.kv_append(make_problem()) is table.kv_append(make_problem())
    assert [choice.operator for choice in table.explain()] == ["attention", "kv_append"]


def test_no_kernel_names_every_reason() -> None:
    nothing = KernelSpec("small", Limits(head_dims=(64, 64)), torch_ref.TorchReference)
    with pytest.raises(NoKernel, match=r"attention of cpu .*small: head_dim 8: takes 64 to 64"):
        KernelTable(attention=(nothing,)).attention(make_problem())


def test_triton_comes_first_on_cuda() -> None:
    """The choice needs neither a device nor the package, only the kernel does."""
    problem = replace(make_problem(dtype=torch.bfloat16, head_dim=64, block_size=16, window=5), device="cuda")
    fitting = [spec.name for spec in ATTENTION if not spec.limits.reject(problem)]
    assert fitting[0] == "triton_paged"
    assert len(fitting) > 1


def test_layers_get_the_kernels_of_their_spec() -> None:
    table = KernelTable()
    choose = Chooser(table, torch.float32, torch.device("cpu"), block_size=32)
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, rope=None, window=5)
    kernels = choose(spec)
    assert isinstance(kernels.attention, torch_sdpa.TorchSdpa)
    problem = "cpu float32 6/2 heads of 16, blocks of 32, window 5"
    assert [(choice.operator, choice.problem) for choice in table.explain()] == [
        ("heads", "cpu float32 6/2 heads of 16, blocks of 32, no rotation"),
        ("kv_append", problem),
        ("attention", problem),
    ]
