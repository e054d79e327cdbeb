"""Latent self-attention (MLA; DeepSeek-AI, 2024) over a paged cache of latents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_executor.batch import BatchInputs
from model_executor.kv_cache import LayerCache
from model_executor.layers.attention import KernelChooser
from model_executor.layers.linear import Linear
from model_executor.layers.rotary import Rotation
from model_executor.models.spec import AttentionSpec, NormSpec


class LatentAttention(nn.Module):
    """Queries, and latents for keys and values; rotation of the parts that are rotated; cache; attention; output.

    Args:
        spec: of kind "mla".
        hidden_size: width of input and output.
        choose: gives the kernels for this spec.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        choose: KernelChooser,
    ) -> None:
        super().__init__()
        assert spec.latent is not None
        latent, heads = spec.latent, spec.num_heads
        self.spec = spec
        self.latent = latent
        self.query: nn.Module
        if latent.query_rank is None:
            self.query = FullQueries(spec, hidden_size, choose)
        else:
            self.query = LatentQueries(spec, latent.query_rank, latent.norm, hidden_size, choose)
        self.down = choose.linear(hidden_size, latent.width, bias=spec.qkv_bias)
        self.norm = choose.norm(latent.norm, latent.kv_rank)
        made = heads * (latent.nope_dim + latent.value_dim)
        # The attention kernel takes the weight itself.
        self.up = Linear(latent.kv_rank, made, bias=False, dtype=choose.dtype, device=choose.device)
        self.output = choose.linear(heads * latent.value_dim, hidden_size, bias=spec.output_bias)
        self.kernels = choose.latent(spec)

    def forward(self, hidden: Tensor, rotation: Rotation | None, cache: LayerCache, batch: BatchInputs) -> Tensor:
        """hidden [T, hidden_size] to [T, hidden_size]; appends the batch's latents to the cache first."""
        latent = self.latent
        nope, rope = torch.split(self.query(hidden), [latent.nope_dim, latent.rope_dim], dim=-1)
        query = torch.cat((nope, self._rotated(rope, rotation)), dim=-1)
        small, key = torch.split(self.down(hidden), [latent.kv_rank, latent.rope_dim], dim=-1)
        kept = torch.cat((self.norm(small), self._rotated(key[:, None], rotation)[:, 0]), dim=-1)
        self.kernels.kv_append.forward(kept, cache, batch.slot_mapping)
        attended = self.kernels.attention.forward(query, self.up.weight, cache, batch)
        out: Tensor = self.output(attended.reshape(hidden.shape[0], -1))
        return out

    def _rotated(self, heads: Tensor, rotation: Rotation | None) -> Tensor:
        """[T, heads, rope_dim] to the same, rotated and with the halves of the pairs apart."""
        if self.latent.interleaved:
            heads = heads.reshape(*heads.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return heads if rotation is None else rotation.apply(heads)


class FullQueries(nn.Module):
    """Queries from the hidden state.

    Args:
        spec: of the attention.
        hidden_size: width of the input.
        choose: makes the projections.
    """

    def __init__(self, spec: AttentionSpec, hidden_size: int, choose: KernelChooser) -> None:
        super().__init__()
        self._shape = (spec.num_heads, spec.head_dim)
        self.full = choose.linear(hidden_size, spec.num_heads * spec.head_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, num_heads, head_dim]."""
        queries: Tensor = self.full(hidden)
        return queries.view(-1, *self._shape)


class LatentQueries(nn.Module):
    """Queries from the hidden state through a latent of their own.

    Args:
        spec: of the attention.
        rank: width of the latent.
        norm: of the latent.
        hidden_size: width of the input.
        choose: makes the projections.
    """

    def __init__(self, spec: AttentionSpec, rank: int, norm: NormSpec, hidden_size: int, choose: KernelChooser) -> None:
        super().__init__()
        self._shape = (spec.num_heads, spec.head_dim)
        self.down = choose.linear(hidden_size, rank, bias=spec.qkv_bias)
        self.norm = choose.norm(norm, rank)
        self.up = choose.linear(rank, spec.num_heads * spec.head_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, num_heads, head_dim]."""
        queries: Tensor = self.up(self.norm(self.down(hidden)))
        return queries.view(-1, *self._shape)
