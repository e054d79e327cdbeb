from __future__ import annotations

from typing import get_args

import pytest
import torch

from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.layers.activation import ACTIVATIONS
from model_executor.layers.mlp import GatedMlp
from model_executor.models.fields import ACTIVATION_NAMES
from model_executor.models.spec import Activation, MlpSpec
from tests.model_executor.engine import BLOCK_SIZE, CPU


def test_mlp_by_hand() -> None:
    """One element each: down * (relu(gate x) * up x)."""
    mlp = GatedMlp(MlpSpec(1, "relu"), 1, Chooser(KernelTable(), torch.float32, CPU, BLOCK_SIZE))
    mlp.gate_up.weight.copy_(torch.tensor([[2.0, 3.0]]))
    mlp.down.weight.copy_(torch.tensor([[5.0]]))
    assert mlp(torch.tensor([[1.0], [-1.0]])).tolist() == [[30.0], [0.0]]


def test_every_activation_is_there() -> None:
    assert set(ACTIVATIONS) == set(get_args(Activation))


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_activations_equal_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-8, 8, 1001)
    ours = ACTIVATIONS[ACTIVATION_NAMES[name]](x)
    torch.testing.assert_close(ours, ACT2FN[name](x), rtol=0, atol=1e-6)
