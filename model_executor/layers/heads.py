"""Operator "heads": what stands between the projection of a token and its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from model_executor.attention.spec import Layout
from model_executor.batch import BatchInputs
from model_executor.kv_cache import LayerCache
from model_executor.layers.norm import QueryKeyNorm
from model_executor.layers.operator import OperatorSpec
from model_executor.layers.rotary import Rotation


@dataclass(frozen=True)
class HeadsProblem:
    """Norm of queries and keys, their rotation, and the append to the cache.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of the projection.
        num_heads, num_kv_heads, head_dim: of queries, and of keys and values.
        block_size: tokens a KV block.
        rope: name of the rotation, None without one.
        qk_norm: whether heads are normed.
    """

    device: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    rope: str | None
    qk_norm: bool

    def __str__(self) -> str:
        text = f"{self.device} {str(self.dtype).removeprefix('torch.')} {self.num_heads}/{self.num_kv_heads} heads"
        text += f" of {self.head_dim}, blocks of {self.block_size}, {self.rope or 'no'} rotation"
        return f"{text}, normed" if self.qk_norm else text


class HeadsKernel(Protocol):
    """Operator "heads"."""

    layout: Layout
    """Of the keys that it writes."""

    def forward(
        self,
        projected: Tensor,
        rotation: Rotation | None,
        norm: QueryKeyNorm | None,
        cache: LayerCache,
        batch: BatchInputs,
    ) -> Tensor:
        """Queries [T, num_heads, head_dim] of the projection [T, (num_heads + 2 * num_kv_heads) * head_dim], which it
        may change; keys and values go into the cache, with what is not finite replaced: see kv_cache.
        """
        ...


HeadsSpec: TypeAlias = OperatorSpec[HeadsProblem, HeadsKernel | None]


def _separate(problem: HeadsProblem) -> None:
    del problem


# No kernel: the layer calls norm, rotation and append one after the other.
SEPARATE_SPEC: Final[HeadsSpec] = OperatorSpec("separate", _separate)
