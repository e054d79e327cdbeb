from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_executor.attention import mla, mla_absorbed
from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.attention.mla import LatentCopy, MlaReference
from model_executor.errors import NoKernel
from model_executor.kv_cache import KVCache, LayerShape
from model_executor.layers.operator import OperatorSpec
from model_executor.models.spec import AttentionSpec, LatentSpec, NormSpec
from tests.model_executor.latents import CPU, dense_latent, make_latent_case, make_latent_problem

ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7)), min_size=1, max_size=5)


def test_by_hand() -> None:
    """One head, all widths 1, scale 1: keys are 2 c + r = 0 and ln 3, values 4 c = 0 and 4: 3/4 of 4."""
    problem = make_latent_problem(1, 1, 1, 1, 1)
    problem = type(problem)(**{**vars(problem), "scale": 1.0})
    case = make_latent_case(problem, [(1, 1)], seed=0)
    slots = case.batch.block_tables[0, 0] * problem.block_size + torch.arange(2)
    LatentCopy(problem).forward(torch.tensor([[0.0, 0.0], [1.0, math.log(3.0) - 2.0]]), case.cache[0], slots)
    up = torch.tensor([[2.0, 4.0]])
    output = MlaReference(problem).forward(torch.ones(1, 1, 2), up, case.cache[0], case.batch)
    assert output.item() == pytest.approx(3.0)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.sampled_from([1, 3]), st.sampled_from([1, 4, 16]), st.integers(0, 10**6))
def test_against_dense_attention(rows: list[tuple[int, int]], heads: int, block_size: int, seed: int) -> None:
    case = make_latent_case(make_latent_problem(heads, block_size=block_size), rows, seed)
    output = MlaReference(case.problem).forward(case.query, case.up, case.cache[0], case.batch)
    assert torch.allclose(output.double(), dense_latent(case), rtol=0, atol=4e-6)


def test_append_writes_where_it_is_told_and_keeps_the_cache_finite() -> None:
    problem = make_latent_problem(kv_rank=2, rope_dim=2)
    cache = KVCache.allocate([LayerShape(1, 4, 0)], 3, 4, torch.float32, CPU)
    latent = torch.tensor([[math.nan, math.inf, -math.inf, 1.5], [1.0, 2.0, 3.0, 4.0]])
    LatentCopy(problem).forward(latent, cache[0], torch.tensor([9, 0]))
    flat = cache[0].key.view(-1, 4)
    largest = torch.finfo(torch.float32).max
    assert flat[9].tolist() == [0.0, largest, -largest, 1.5]
    assert flat[0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert int(flat.any(dim=1).sum()) == 2


def test_layers_get_the_kernels_of_their_spec_and_the_choice_is_explained() -> None:
    table = KernelTable()
    choose = Chooser(table, torch.float32, CPU, block_size=16)
    latent = LatentSpec(
        kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6, query_rank=None, norm=NormSpec(1e-6), interleaved=True
    )
    spec = AttentionSpec(3, 3, 12, 0.25, None, kind="mla", latent=latent)
    kernels = choose.latent(spec)
    assert isinstance(kernels.attention, mla_absorbed.MlaAbsorbed)
    assert choose.latent(spec).kv_append is kernels.kv_append
    problem = "cpu float32 3 heads of 8+4/6 from latents of 16, blocks of 16"
    assert [(choice.operator, choice.problem, choice.chosen) for choice in table.explain()] == [
        ("mla_attention", problem, "mla_absorbed"),
        ("kv_append", problem, "latent_copy"),
    ]
    assert [candidate.name for candidate in table.explain()[0].candidates] == ["mla_absorbed", "mla_ref"]


def test_a_kernel_for_another_device_is_refused_by_name() -> None:
    elsewhere = OperatorSpec("fast", MlaReference, devices=frozenset(("cuda",)))
    table = KernelTable(mla_attention=(elsewhere, mla.SPEC))
    assert isinstance(table.mla_attention(make_latent_problem()), MlaReference)
    assert table.explain()[0].candidates[0].reasons == ["device cpu: runs on cuda"]
    with pytest.raises(NoKernel, match=r"mla_attention of cpu .*fast: device cpu"):
        KernelTable(mla_attention=(elsewhere,)).mla_attention(make_latent_problem())
