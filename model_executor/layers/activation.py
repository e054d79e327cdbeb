"""Activations by the names of models/spec.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from model_executor.models.spec import Activation

ACTIVATIONS: Final[Mapping[Activation, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
}
