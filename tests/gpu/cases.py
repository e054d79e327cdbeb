"""Attention problems with everything around them: a cache, shuffled block tables, ragged rows, poison."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_executor.attention.spec import AttentionProblem
from model_executor.attention.torch_ref import TorchReference
from model_executor.batch import BatchInputs, StepRows, build_index, to_inputs
from model_executor.kv_cache import LayerCache

SPARE_BLOCKS = 3
# Largest relative error, in the Euclidean norm, against the oracle in float32 on the same inputs.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """What a case is about.

    Attributes:
        rows: (tokens computed before, tokens computed now) of each sequence.
        heads, kv_heads, head_dim, block_size, window, soft_cap, dtype: of the problem.
    """

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')} {self.heads}/{self.kv_heads}x{self.head_dim}"
        text += f" blocks {self.block_size}, {len(self.rows)} rows"
        if self.window:
            text += f", window {self.window}"
        if self.soft_cap:
            text += f", cap {self.soft_cap:g}"
        return text


MIXED = ((69, 1), (0, 1), (2, 5), (0, 40), (130, 3))

SHAPES = (
    Shape(rows=((0, 1),)),
    Shape(rows=((299, 1),), heads=3, kv_heads=1),
    Shape(rows=tuple((n, 1) for n in (0, 15, 16, 17, 63, 64, 65, 127, 200)), heads=2),
    Shape(rows=((0, 65),), heads=9, kv_heads=3),
    Shape(rows=((0, 1), (0, 2), (0, 16), (0, 17)), heads=2),
    Shape(rows=((100, 30), (31, 33)), block_size=128),
    Shape(rows=MIXED, head_dim=128, block_size=64),
    Shape(rows=MIXED, head_dim=256, heads=2, kv_heads=1, block_size=32),
    Shape(rows=MIXED, head_dim=80, window=20, dtype=torch.bfloat16),
    Shape(rows=MIXED, head_dim=96, soft_cap=5.0, dtype=torch.float16),
    Shape(rows=MIXED, head_dim=112, heads=6, kv_heads=6, window=1),
    Shape(rows=MIXED, head_dim=16, heads=14, window=64, soft_cap=30.0),
    Shape(rows=MIXED, head_dim=64, heads=40, kv_heads=1, dtype=torch.bfloat16),
    Shape(rows=((300, 1), (180, 120), (511, 1)), head_dim=32, window=100, block_size=32),
    Shape(rows=MIXED, head_dim=64, block_size=48, window=4096),
    Shape(rows=MIXED, dtype=torch.float16),
)


@dataclass(frozen=True)
class Case:
    """A shape with data. Positions that no row owns hold NaN in `cache` and zeros in `clean`."""

    problem: AttentionProblem
    query: Tensor
    batch: BatchInputs
    cache: LayerCache
    clean: LayerCache

    def expected(self) -> Tensor:
        """The oracle's answer [T, H, D] in float32, on the same inputs."""
        wide = LayerCache(self.clean.key.float(), self.clean.value.float())
        oracle = TorchReference(dataclasses.replace(self.problem, dtype=torch.float32))
        return oracle.forward(self.query.float(), wide, self.batch)


def build(shape: Shape, device: torch.device, seed: int) -> Case:
    """A case with drawn numbers; equal arguments give equal cases on every device."""
    rng = np.random.default_rng(seed)
    starts, counts = (np.array(column, dtype=np.int64) for column in zip(*shape.rows, strict=True))
    table, blocks = block_table(starts + counts, shape.block_size, rng)
    rows = StepRows(np.arange(len(counts)), starts, counts, np.ones(len(counts), dtype=np.bool_))
    index = build_index(rows, table, shape.block_size)
    tokens = int(counts.sum())
    batch = to_inputs(index, torch.zeros(tokens, dtype=torch.int64, device=device))
    generator = torch.Generator().manual_seed(seed)
    size = (blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    key, value = (torch.randn(size, generator=generator).to(shape.dtype) for _ in range(2))
    # A slice of something wider: kernels get queries by their strides.
    query = torch.randn((tokens, shape.heads + 1, shape.head_dim), generator=generator).to(shape.dtype)[:, 1:]
    owned = _owned(index.block_tables, index.context_lens, blocks, shape.block_size)[..., None, None]
    cache = LayerCache(*(x.masked_fill(~owned, float("nan")).to(device) for x in (key, value)))
    clean = LayerCache(*(x.masked_fill(~owned, 0.0).to(device) for x in (key, value)))
    return Case(_problem(shape, device), query.to(device), batch, cache, clean)


def block_table(contexts: np.ndarray, block_size: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Distinct shuffled blocks for sequences of these lengths, int32 [R, B], and how many blocks there are."""
    needed = -(-contexts // block_size)
    blocks = int(needed.sum()) + SPARE_BLOCKS
    ids = rng.permutation(blocks)
    # What a row does not need points at a block that no row owns.
    table = np.full((len(contexts), int(needed.max())), ids[-1], dtype=np.int32)
    taken = 0
    for row, count in enumerate(needed):
        table[row, :count] = ids[taken : taken + count]
        taken += count
    return table, blocks


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Euclidean norm of the difference over that of the expected; infinite when something is not finite."""
    if not output.isfinite().all():
        return float("inf")
    difference: Tensor = (output.double() - expected.double()).norm() / expected.double().norm()
    return difference.item()


def _owned(tables: np.ndarray, contexts: np.ndarray, blocks: int, block_size: int) -> Tensor:
    owned = torch.zeros((blocks, block_size), dtype=torch.bool)
    for table, context in zip(tables, contexts, strict=True):
        places = np.arange(context)
        owned[torch.from_numpy(table[places // block_size]), torch.from_numpy(places % block_size)] = True
    return owned


def _problem(shape: Shape, device: torch.device) -> AttentionProblem:
    return AttentionProblem(
        device=device.type,
        dtype=shape.dtype,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        scale=shape.head_dim**-0.5,
        window=shape.window,
        soft_cap=shape.soft_cap,
    )
