from __future__ import annotations

import pytest
import torch

from model_executor.layers.norm import QueryKeyNorm, RmsNorm
from model_executor.models.spec import AttentionSpec, NormSpec
from tests.model_executor.engine import CPU


def test_norm_by_hand() -> None:
    norm = RmsNorm(2, NormSpec(0.0), torch.float32, CPU)
    norm.weight.copy_(torch.tensor([1.0, 2.0]))
    # mean square of (3, 4) is 12.5
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 8.0]) / 12.5**0.5)


def test_eps_keeps_zero_finite() -> None:
    norm = RmsNorm(4, NormSpec(1e-6), torch.float32, CPU)
    norm.weight.fill_(1)
    assert torch.equal(norm(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_equals_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    generator = torch.Generator().manual_seed(0)
    theirs = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    ours = RmsNorm(64, NormSpec(1e-5), dtype, CPU)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(64, generator=generator))
        ours.weight.copy_(theirs.weight)
        # Values whose squares overflow float16 show where the mean is taken.
        x = (torch.randn(5, 64, generator=generator) * 500).to(dtype)
        assert torch.equal(ours(x), theirs(x))


def test_offset_norm_by_hand() -> None:
    norm = RmsNorm(2, NormSpec(0.0, offset=True), torch.float32, CPU)
    norm.weight.copy_(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 8.0]) / 12.5**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_offset_norm_equals_transformers(dtype: torch.dtype) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    generator = torch.Generator().manual_seed(0)
    theirs = Gemma3RMSNorm(64, eps=1e-5).to(dtype)
    ours = RmsNorm(64, NormSpec(1e-5, offset=True), dtype, CPU)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(64, generator=generator))
        ours.weight.copy_(theirs.weight)
        x = (torch.randn(5, 64, generator=generator) * 500).to(dtype)
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [False, True])
def test_query_key_norm_is_the_norm_of_each_head(dtype: torch.dtype, offset: bool) -> None:
    """Three query heads share the first half of the weight, two key heads the second."""
    spec = NormSpec(1e-5, offset=offset)
    generator = torch.Generator().manual_seed(0)
    both = QueryKeyNorm(AttentionSpec(3, 2, 8, 1.0, None), spec, dtype, CPU)
    both.weight.copy_(torch.randn(16, generator=generator))
    heads = torch.randn(7, 5, 8, generator=generator).to(dtype)
    parts = []
    for weight, part in ((both.weight[:8], heads[:, :3]), (both.weight[8:], heads[:, 3:])):
        single = RmsNorm(8, spec, dtype, CPU)
        single.weight.copy_(weight)
        parts.append(single(part))
    assert torch.equal(both(heads), torch.cat(parts, dim=1))
