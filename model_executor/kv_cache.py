"""The paged KV cache: for each runtime layer one tensor of keys and one of values, cut into blocks of tokens.

Invariant: every number in the cache is finite. Memory starts as zeros and appends replace what is not finite. A kernel
may therefore read a position and give it weight zero: zero times a finite number adds nothing, so neither the unwritten
tail of a block nor what an earlier owner left there can reach another sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_executor import huge_pages
from model_executor.models.spec import AttentionSpec


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one runtime layer.

    Attributes:
        key, value: [blocks + 1, block_size, num_kv_heads, head_dim], contiguous; the last block is scratch. A layer
            that keeps one latent a token keeps it as the key of one head; its value has no elements. Kernels whose
            layout is "turned" keep each block of keys as [num_kv_heads, head_dim, block_size] in the same memory.
    """

    key: Tensor
    value: Tensor

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.key.shape[1]

    def slots(self) -> tuple[Tensor, Tensor]:
        """Keys and values by token slot: [(blocks + 1) * block_size, num_kv_heads, head_dim], views."""
        return self.key.flatten(0, 1), self.value.flatten(0, 1)


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token.

    Attributes:
        num_kv_heads: of keys and of values.
        head_dim: of keys.
        value_dim: of values; None: that of keys, 0: none are kept.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None

    @classmethod
    def of(cls, spec: AttentionSpec) -> LayerShape:
        """What this kind of attention keeps."""
        return cls(spec.num_kv_heads, spec.head_dim) if spec.latent is None else cls(1, spec.latent.width, 0)

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a head of keys and of values."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's key and value."""
        return sum(self.widths) * self.num_kv_heads * dtype.itemsize


def group_layers(windows: Sequence[int | None], max_model_len: int) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Put layers that need a token's KV equally long into one KV group.

    Args:
        windows: of each runtime layer; None: it sees every token.
        max_model_len: a window that no sequence outgrows is none.

    Returns:
        The windows of the groups, None first, then rising; and the group of each layer.
    """
    reach = [window if window is not None and window < max_model_len else None for window in windows]
    groups = tuple(sorted(set(reach), key=lambda window: window or 0))
    return groups, tuple(groups.index(window) for window in reach)


class KVCache:
    """The cache of all layers, indexed by runtime layer. Layers of one KV group share block ids.

    Args:
        layers: one LayerCache for each runtime layer.
        pools: for each KV group the blocks the core may hand out, ids 0 .. pools[g] - 1. Block pools[g] is its scratch
            block, where padding rows and warm-up write.
        group_of: the KV group of each layer.

    Attributes:
        layers, pools, group_of: as given.
        block_size: tokens a block.
    """

    def __init__(self, layers: list[LayerCache], pools: tuple[int, ...], group_of: tuple[int, ...]) -> None:
        assert all(layer.key.shape[0] == pools[group] + 1 for layer, group in zip(layers, group_of, strict=True))
        self.layers = layers
        self.pools = pools
        self.group_of = group_of
        self.block_size = layers[0].block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the first KV group."""
        return self.pools[0]

    @property
    def scratch_block(self) -> int:
        """The scratch block of the first KV group."""
        return self.pools[0]

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    @classmethod
    def allocate(
        cls, shapes: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """A cache of zeros with one KV group of num_blocks blocks; see allocate_groups."""
        return cls.allocate_groups(shapes, (num_blocks,), (0,) * len(shapes), block_size, dtype, device)

    @classmethod
    def allocate_groups(
        cls,
        shapes: list[LayerShape],
        pools: tuple[int, ...],
        group_of: tuple[int, ...],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """A cache of zeros. On CPU the pages are touched by the first write only.

        Args:
            shapes: of each runtime layer, at least one.
            pools: blocks of each KV group without the scratch block.
            group_of: the KV group of each runtime layer.
            block_size: tokens a block.
            dtype: of keys and values.
            device: where they live.
        """
        sizes = [
            (pools[group] + 1, block_size, shape.num_kv_heads, width)
            for shape, group in zip(shapes, group_of, strict=True)
            for width in shape.widths
        ]
        # Side by side: if each began a huge page, all would touch their next one in the same step.
        arena = huge_pages.Arena(sum(math.prod(size) * dtype.itemsize + huge_pages.ALIGNMENT for size in sizes))
        made = [_zeros(size, dtype, device, arena) for size in sizes]
        layers = [LayerCache(key, value) for key, value in zip(made[::2], made[1::2], strict=True)]
        return cls(layers, pools, group_of)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, scratch block included."""
        return sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers)


def finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What the cache keeps of x: in its dtype, NaN as zero, and what is beyond its largest number as that."""
    return torch.nan_to_num(torch.nan_to_num(x, nan=0.0).to(dtype))


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, arena: huge_pages.Arena) -> Tensor:
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    return arena.take(math.prod(size) * dtype.itemsize).view(dtype).view(size)
