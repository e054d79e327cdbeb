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
from model_executor.layers.heads import HeadsKernel
from model_executor.layers.linear import Linear
from model_executor.layers.norm import QueryKeyNorm, RmsNorm
from model_executor.layers.rotary import Rotation
from model_executor.models.spec import Activation, AttentionSpec, MlpSpec, NormSpec


@dataclass(frozen=True)
class LayerKernels:
    """The kernels chosen for one class of attention.

    Attributes:
        attention: reads the cache.
        kv_append: writes it; None: `heads` does.
        heads: does all between projection and attention, the append included; None: the layer does it step by step.
    """

    attention: AttentionKernel
    kv_append: AppendKernel | None
    heads: HeadsKernel | None = None


class KernelChooser(Protocol):
    """Gives the parts of a block their kernels, and makes the parts that need nothing else."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they live."""
        ...

    def __call__(self, spec: AttentionSpec) -> LayerKernels:
        """The kernels of grouped attention."""
        ...

    def latent(self, spec: AttentionSpec) -> LatentKernels:
        """The kernels of latent attention."""
        ...

    def experts(self, spec: MlpSpec, hidden_size: int) -> ExpertsKernel:
        """The kernel of a mixture of experts."""
        ...

    def linear(
        self, inputs: int, outputs: int, *, bias: bool, gate: Activation | None = None, exact: bool = False
    ) -> Linear:
        """A linear map, see LinearProblem; an `exact` one is never computed in int8."""
        ...

    def norm(self, spec: NormSpec, size: int) -> RmsNorm:
        """A norm over a last axis of this size."""
        ...


class GroupedAttention(nn.Module):
    """Queries, keys and values in one projection, norm of heads, rotation, cache, attention, output projection.

    Args:
        spec: heads, scale, window, biases, norm.
        hidden_size: width of input and output.
        choose: gives the kernels for this spec.
    """

    def __init__(self, spec: AttentionSpec, hidden_size: int, choose: KernelChooser) -> None:
        super().__init__()
        self.spec = spec
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = choose.linear(hidden_size, width, bias=spec.qkv_bias)
        self.output = choose.linear(spec.num_heads * spec.head_dim, hidden_size, bias=spec.output_bias)
        self.qk_norm: QueryKeyNorm | None = None
        if spec.qk_norm is not None:
            self.qk_norm = QueryKeyNorm(spec, spec.qk_norm, choose.dtype, choose.device)
        self.kernels = choose(spec)

    def forward(self, hidden: Tensor, rotation: Rotation | None, cache: LayerCache, batch: BatchInputs) -> Tensor:
        """hidden [T, hidden_size] to [T, hidden_size]; appends the batch's keys and values to the cache first."""
        if self.kernels.heads is not None:
            query = self.kernels.heads.forward(self.qkv(hidden), rotation, self.qk_norm, cache, batch)
        else:
            query = self._heads(self.qkv(hidden), rotation, cache, batch)
        attended = self.kernels.attention.forward(query, cache, batch)
        out: Tensor = self.output(attended.reshape(hidden.shape[0], -1))
        return out

    def _heads(self, projected: Tensor, rotation: Rotation | None, cache: LayerCache, batch: BatchInputs) -> Tensor:
        """Operator "heads", step by step."""
        spec = self.spec
        assert self.kernels.kv_append is not None
        heads = projected.view(projected.shape[0], -1, spec.head_dim)
        rotated, value = torch.split(heads, [spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if self.qk_norm is not None:
            rotated = self.qk_norm(rotated)
        if rotation is not None:
            rotated = rotation.apply(rotated)
        query, key = torch.split(rotated, [spec.num_heads, spec.num_kv_heads], dim=1)
        self.kernels.kv_append.forward(key, value, cache, batch.slot_mapping)
        return query
