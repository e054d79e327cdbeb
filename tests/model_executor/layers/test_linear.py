from __future__ import annotations

import pytest
import torch

from model_executor.layers.linear import Linear
from tests.model_executor.engine import CPU


def test_linear_by_hand() -> None:
    linear = Linear(2, 3, bias=True, dtype=torch.float32, device=CPU)
    linear.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert linear.bias is not None
    linear.bias.copy_(torch.tensor([10.0, 20.0, 30.0]))
    assert linear(torch.tensor([[1.0, 1.0]])).tolist() == [[15.0, 27.0, 39.0]]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_the_transposed_form(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.nn.Linear(16, 24, bias=bias)
    linear = Linear(16, 24, bias=bias, dtype=torch.float32, device=CPU)
    linear.weight.copy_(reference.weight.t())
    if linear.bias is not None:
        linear.bias.copy_(reference.bias)
    x = torch.randn(5, 16, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(linear(x), reference(x))


def test_weight_is_contiguous_and_frozen() -> None:
    linear = Linear(3, 5, bias=True, dtype=torch.float16, device=CPU)
    assert linear.weight.shape == (3, 5)
    assert linear.weight.is_contiguous()
    assert not any(parameter.requires_grad for parameter in linear.parameters())
