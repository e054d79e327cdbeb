from __future__ import annotations

import pytest
import torch

from model_executor.layers.norm import RmsNorm
from tests.model_executor.engine import CPU


def test_norm_by_hand() -> None:
    norm = RmsNorm(2, 0.0, torch.float32, CPU)
    norm.weight.copy_(torch.tensor([1.0, 2.0]))
    # mean square of (3, 4) is 12.5
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 8.0]) / 12.5**0.5)


def test_eps_keeps_zero_finite() -> None:
    norm = RmsNorm(4, 1e-6, torch.float32, CPU)
    norm.weight.fill_(1)
    assert torch.equal(norm(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_equals_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    generator = torch.Generator().manual_seed(0)
    theirs = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    ours = RmsNorm(64, 1e-5, dtype, CPU)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(64, generator=generator))
        ours.weight.copy_(theirs.weight)
        # Values whose squares overflow float16 show where the mean is taken.
        x = (torch.randn(5, 64, generator=generator) * 500).to(dtype)
        assert torch.equal(ours(x), theirs(x))
