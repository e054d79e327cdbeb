"""The paged KV cache: for each runtime layer one tensor of keys and one of values, cut into blocks of tokens.

Invariant: every number in the cache is finite. Memory starts as zeros and appends replace what is not finite. A kernel
may therefore read a position and give it weight zero: zero times a finite number adds nothing, so neither the unwritten
tail of a block nor what an earlier owner left there can reach another sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_executor.models.spec import AttentionSpec


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one runtime layer.

    Attributes:
        key, value: [blocks + 1, block_size, num_kv_heads, head_dim], contiguous; the last block is scratch. A layer
            that keeps one latent a token keeps it as the key of one head; its value has no elements.
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


class KVCache:
    """The cache of all layers, indexed by runtime layer.

    Attributes:
        num_blocks: blocks the core may hand out, ids 0 .. num_blocks - 1.
        scratch_block: id of one block more, where padding rows and warm-up write.
        block_size: tokens a block.
        layers: one LayerCache for each runtime layer.
    """

    def __init__(self, layers: list[LayerCache], num_blocks: int) -> None:
        assert all(layer.key.shape[0] == num_blocks + 1 for layer in layers)
        self.layers = layers
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks
        self.block_size = layers[0].block_size

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    @classmethod
    def allocate(
        cls, shapes: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """A cache of zeros. On CPU the pages are touched by the first write only.

        Args:
            shapes: of each runtime layer, at least one.
            num_blocks: blocks without the scratch block.
            block_size: tokens a block.
            dtype: of keys and values.
            device: where they live.
        """
        layers = []
        for shape in shapes:
            outer = (num_blocks + 1, block_size, shape.num_kv_heads)
            key, value = (_zeros((*outer, width), dtype, device) for width in shape.widths)
            layers.append(LayerCache(key, value))
        return cls(layers, num_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, scratch block included."""
        return sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    # torch.zeros writes every page; numpy takes zeroed pages from the kernel as they are touched.
    raw = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)
