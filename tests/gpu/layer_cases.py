"""What the kernels of layers are checked on, in the interpreter and on a device, beside the reference in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_executor.attention.dispatch import Chooser
from model_executor.batch import BatchInputs
from model_executor.kv_cache import KVCache, LayerCache, LayerShape
from model_executor.layers.attention import GroupedAttention
from model_executor.layers.heads import HeadsProblem
from model_executor.layers.rotary import Rotary, Rotation
from model_executor.models.spec import AttentionSpec, NormSpec, RopeSpec
from model_executor.tools.reference import reference_table

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
POSITIONS, BLOCK_SIZE = 500, 16
HIDDEN = 8


@dataclass(frozen=True)
class HeadsShape:
    """What a case of operator "heads" is about.

    Attributes:
        heads, kv_heads, head_dim, dtype: of the projection.
        rotary: leading elements of a head that are rotated; 0: none.
        norm: of queries and keys.
        kept: dtype of the cache; None: dtype.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = F32
    rotary: int = 0
    norm: NormSpec | None = None
    kept: torch.dtype | None = None

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')} {self.heads}/{self.kv_heads}x{self.head_dim}"
        text += f", {self.rotary} rotated"
        if self.norm is not None:
            text += ", normed with an offset" if self.norm.offset else ", normed"
        return text if self.kept is None else f"{text}, kept in {str(self.kept).removeprefix('torch.')}"

    def problem(self, device: str) -> HeadsProblem:
        """As the registry gets it."""
        rope = "default" if self.rotary else None
        return HeadsProblem(
            device, self.dtype, self.heads, self.kv_heads, self.head_dim, BLOCK_SIZE, rope, self.norm is not None
        )


HEADS_SHAPES = (
    HeadsShape(4, 2, 64, F32, rotary=64),
    HeadsShape(9, 3, 64, BF16, rotary=64),
    HeadsShape(2, 1, 16, F16, rotary=16),
    HeadsShape(3, 3, 80, BF16, rotary=32),
    HeadsShape(4, 4, 96, F16, rotary=96),
    HeadsShape(6, 1, 112, F32, rotary=56, norm=NormSpec(1e-6)),
    HeadsShape(16, 8, 128, BF16, rotary=128, norm=NormSpec(1e-6)),
    HeadsShape(4, 2, 128, F32, rotary=128, norm=NormSpec(1e-6, offset=True)),
    HeadsShape(4, 1, 256, BF16, rotary=256, norm=NormSpec(1e-6, offset=True)),
    HeadsShape(5, 5, 192, F32),
    HeadsShape(4, 2, 20, BF16, norm=NormSpec(1e-5)),
    HeadsShape(7, 1, 5, F32, rotary=4),
    HeadsShape(4, 2, 64, BF16, rotary=64, kept=F16),
    HeadsShape(4, 2, 64, F32, rotary=64, kept=BF16),
)


@dataclass(frozen=True)
class HeadsCase:
    """A shape with data.

    Attributes:
        problem: of the kernel.
        layer: whose norm is used, and whose steps one after the other are the reference.
        projected: a slice of something wider; with `broken`, some of it is not finite.
        rotation, batch: for a kernel.
    """

    problem: HeadsProblem
    layer: GroupedAttention
    projected: Tensor
    rotation: Rotation | None
    batch: BatchInputs
    kept: torch.dtype

    def cache(self) -> LayerCache:
        """An empty cache, which holds all slots of the batch."""
        problem, tokens = self.problem, self.batch.num_tokens
        shape = LayerShape(problem.num_kv_heads, problem.head_dim)
        return KVCache.allocate([shape], tokens // BLOCK_SIZE + 2, BLOCK_SIZE, self.kept, self.projected.device)[0]

    def separate(self, cache: LayerCache) -> Tensor:
        """The reference: queries, with keys and values in the cache."""
        return self.layer._heads(self.projected.contiguous(), self.rotation, cache, self.batch)


def build_heads(shape: HeadsShape, tokens: int, device: torch.device, seed: int, *, broken: bool = False) -> HeadsCase:
    """A case with drawn numbers; equal arguments give equal cases on every device."""
    generator = torch.Generator().manual_seed(seed)
    rope = RopeSpec("default", 10000.0, shape.rotary, POSITIONS) if shape.rotary else None
    spec = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, 1.0, rope, qk_norm=shape.norm)
    layer = GroupedAttention(spec, HIDDEN, Chooser(reference_table(), shape.dtype, device, BLOCK_SIZE))
    if layer.qk_norm is not None:
        layer.qk_norm.weight.copy_(torch.randn(layer.qk_norm.weight.shape, generator=generator))
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    drawn = (torch.randn((tokens, width + 16), generator=generator) * 3).to(shape.dtype)
    if broken:
        for first, number in enumerate((float("nan"), float("inf"), float("-inf"))):
            drawn.view(-1)[11 * first :: 97] = number
    slots = torch.randperm((tokens // BLOCK_SIZE + 2) * BLOCK_SIZE, generator=generator)[:tokens].to(device)
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator).to(device)
    rotation = None if rope is None else Rotary(rope, POSITIONS, shape.dtype, device)(positions)
    return HeadsCase(
        shape.problem(device.type),
        layer,
        drawn.to(device)[:, 16:],
        rotation,
        _batch(positions, slots),
        shape.kept or shape.dtype,
    )


def _batch(positions: Tensor, slots: Tensor) -> BatchInputs:
    """A batch of which only this is read."""
    nothing = positions[:0]
    return BatchInputs(positions, positions, slots, nothing, nothing, nothing[None], nothing, [], [], 0, ())
