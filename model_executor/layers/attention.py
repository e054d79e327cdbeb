"""Self-attention with grouped query heads over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from model_executor.attention.mla import LatentKernels
from model_executor.attention.spec import AppendKernel, AttentionKernel
from model_executor.batch import BatchInputs
from model_executor.kv_cache import LayerCache
from model_executor.layers.experts import ExpertsKernel
from model_executor.layers.linear import Linear
from model_executor.layers.norm import QueryKeyNorm
from model_executor.layers.rotary import Rotation
from model_executor.models.spec import AttentionSpec, MlpSpec


@dataclass(frozen=True)
class LayerKernels:
    """The kernels chosen for one class of attention.

    Attributes:
        attention: reads the cache.
        kv_append: writes it.
    """

    attention: AttentionKernel
    kv_append: AppendKernel


class KernelChooser(Protocol):
    """Gives the parts of a block their kernels."""

    def __call__(self, spec: AttentionSpec) -> LayerKernels:
        """The kernels of grouped attention."""
        ...

    def latent(self, spec: AttentionSpec) -> LatentKernels:
        """The kernels of latent attention."""
        ...

    def experts(self, spec: MlpSpec, hidden_size: int) -> ExpertsKernel:
        """The kernel of a mixture of experts."""
        ...


class GroupedAttention(nn.Module):
    """Queries, keys and values in one projection, norm of heads, rotation, cache, attention, output projection.

    Args:
        spec: heads, scale, window, biases, norm.
        hidden_size: width of input and output.
        choose: gives the kernels for this spec.
        dtype, device: of the weights.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        choose: KernelChooser,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = Linear(hidden_size, width, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.output = Linear(
            spec.num_heads * spec.head_dim, hidden_size, bias=spec.output_bias, dtype=dtype, device=device
        )
        self.qk_norm: QueryKeyNorm | None = None
        if spec.qk_norm is not None:
            self.qk_norm = QueryKeyNorm(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.qk_norm, dtype, device)
        self.kernels = choose(spec)

    def forward(self, hidden: Tensor, rotation: Rotation | None, cache: LayerCache, batch: BatchInputs) -> Tensor:
        """hidden [T, hidden_size] to [T, hidden_size]; appends the batch's keys and values to the cache first."""
        spec = self.spec
        heads = self.qkv(hidden).view(hidden.shape[0], -1, spec.head_dim)
        rotated, value = torch.split(heads, [spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if self.qk_norm is not None:
            rotated = self.qk_norm(rotated)
        if rotation is not None:
            rotated = rotation.apply(rotated)
        query, key = torch.split(rotated, [spec.num_heads, spec.num_kv_heads], dim=1)
        self.kernels.kv_append.forward(key, value, cache, batch.slot_mapping)
        attended = self.kernels.attention.forward(query, cache, batch)
        out: Tensor = self.output(attended.reshape(hidden.shape[0], -1))
        return out
