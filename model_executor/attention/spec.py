"""What a kernel must do, what it can do, and how it is called.

A kernel is declared by a KernelSpec whose limits are data. The registry asks every spec for its reasons to refuse a
problem, so that a choice can be explained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from model_executor.batch import BatchInputs
from model_executor.kv_cache import LayerCache

Layout = Literal["plain", "turned"]
"""How keys lie in a block: by token, or with the tokens of each element of a head side by side."""


@dataclass(frozen=True)
class AttentionProblem:
    """Causal attention of one layer class over the paged cache.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of queries, and of keys and values before they are kept.
        num_heads, num_kv_heads: the former is a multiple of the latter; head h reads KV head h * KH // H.
        head_dim: of queries, keys and values.
        block_size: tokens a KV block.
        scale: factor on the scores.
        window: a query at position p sees positions p - window + 1 .. p; None sees all from 0.
        soft_cap: scores become cap * tanh(score / cap) after scaling; None leaves them.
        layout: of the keys in the cache.
        cache_dtype: of the cache; None: dtype.
    """

    device: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    layout: Layout = "plain"
    cache_dtype: torch.dtype | None = None

    @property
    def kept_in(self) -> torch.dtype:
        """The dtype of the cache."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    def __str__(self) -> str:
        text = f"{self.device} {str(self.dtype).removeprefix('torch.')} {self.num_heads}/{self.num_kv_heads} heads"
        text += f" of {self.head_dim}, blocks of {self.block_size}"
        if self.window is not None:
            text += f", window {self.window}"
        if self.soft_cap is not None:
            text += f", soft cap {self.soft_cap:g}"
        if self.kept_in != self.dtype:
            text += f", kept in {str(self.kept_in).removeprefix('torch.')}"
        return text


class AttentionKernel(Protocol):
    """Operator "attention"."""

    def forward(self, query: Tensor, layer_cache: LayerCache, batch: BatchInputs) -> Tensor:
        """Attention output [T, num_heads, head_dim] of queries of the same shape.

        The keys and values of this step's tokens are in the cache already.
        """
        ...


class AppendKernel(Protocol):
    """Operator "kv_append"."""

    def forward(self, key: Tensor, value: Tensor, layer_cache: LayerCache, slot_mapping: Tensor) -> None:
        """Write key and value, [T, num_kv_heads, head_dim], at slot_mapping, int64 [T]; no slot stands twice,
        except slots of the scratch block. What is not finite is replaced: see kv_cache.
        """
        ...


K = TypeVar("K", covariant=True)


@dataclass(frozen=True)
class Limits:
    """What a kernel can do; None sets no limit.

    Attributes:
        devices, dtypes: it runs on and in.
        head_dims: smallest and largest head_dim; head_dim_multiple: which it must divide by.
        block_sizes: smallest and largest block_size.
        window, soft_cap: whether it can.
        layouts: of keys that it reads or writes.
        narrow: whether the cache may be of another dtype.
    """

    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    head_dims: tuple[int, int] | None = None
    head_dim_multiple: int = 1
    block_sizes: tuple[int, int] | None = None
    window: bool = True
    soft_cap: bool = True
    layouts: frozenset[Layout] = frozenset(("plain",))
    narrow: bool = True

    def reject(self, problem: AttentionProblem) -> tuple[str, ...]:
        """Why these limits exclude the problem; empty when they do not."""
        reasons = []
        if self.devices is not None and problem.device not in self.devices:
            reasons.append(f"device {problem.device}: runs on {', '.join(sorted(self.devices))}")
        if self.dtypes is not None and problem.dtype not in self.dtypes:
            reasons.append(f"dtype {problem.dtype}: takes {', '.join(sorted(map(str, self.dtypes)))}")
        reasons += _outside("head_dim", problem.head_dim, self.head_dims)
        if problem.head_dim % self.head_dim_multiple:
            reasons.append(f"head_dim {problem.head_dim}: no multiple of {self.head_dim_multiple}")
        reasons += _outside("block_size", problem.block_size, self.block_sizes)
        if problem.window is not None and not self.window:
            reasons.append(f"window {problem.window}: has no sliding window")
        if problem.soft_cap is not None and not self.soft_cap:
            reasons.append(f"soft_cap {problem.soft_cap:g}: has no soft cap")
        if problem.kept_in != problem.dtype and not self.narrow:
            reasons.append(f"cache of {problem.kept_in}: takes {problem.dtype}, as computed in")
        if problem.layout not in self.layouts:
            reasons.append(f"keys {problem.layout}: takes {', '.join(sorted(self.layouts))}")
        return tuple(reasons)


def _outside(name: str, value: int, limits: tuple[int, int] | None) -> list[str]:
    if limits is None or limits[0] <= value <= limits[1]:
        return []
    return [f"{name} {value}: takes {limits[0]} to {limits[1]}"]


@dataclass(frozen=True)
class KernelSpec(Generic[K]):
    """One kernel of the registry.

    Attributes:
        name: in reports.
        limits: what it can do.
        factory: makes the kernel for a problem that the spec does not reject.
        available: why the kernel cannot be used in this process at all (a missing package), None when it can.
    """

    name: str
    limits: Limits
    factory: Callable[[AttentionProblem], K]
    available: Callable[[], str | None] = lambda: None

    def reject(self, problem: AttentionProblem) -> tuple[str, ...]:
        """Why this kernel does not serve the problem; empty when it does."""
        reason = self.available()
        return ((reason,) if reason else ()) + self.limits.reject(problem)
