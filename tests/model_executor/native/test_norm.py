from __future__ import annotations

import pytest
import torch

from model_executor.layers.norm import NormProblem, TorchNorm
from model_executor.native.library import Native
from model_executor.native.norm import native_norm
from tests.model_executor.native.builds import each_build


@pytest.mark.parametrize("native", each_build())
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("size", [1, 15, 64, 100, 576])
def test_equals_torch_and_itself_in_every_batch(native: Native, size: int, offset: bool) -> None:
    problem = NormProblem("cpu", torch.float32, size, offset, 1e-5)
    kernel = native_norm(native).factory(problem)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(100, size, generator=generator) * 30, torch.randn(size, generator=generator)
    x[4] = 0
    made = kernel.forward(x, weight)
    torch.testing.assert_close(made, TorchNorm(problem).forward(x, weight), rtol=2e-6, atol=1e-6)
    assert torch.equal(torch.cat([kernel.forward(row, weight) for row in torch.split(x, 1)]), made)
    turned = x.t().contiguous().t()
    assert torch.equal(kernel.forward(turned, weight), made)
    added = torch.randn(x.shape, generator=generator)
    total = x + added
    assert torch.equal(kernel.forward(x, weight, added), kernel.forward(total, weight))
    assert torch.equal(x, total)
