"""Random problems of latent attention over a paged cache, and dense attention to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_executor.attention.mla import LatentCopy, MlaProblem
from model_executor.batch import BatchInputs, StepRows, build_index, to_inputs
from model_executor.kv_cache import KVCache, LayerShape

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LatentCase:
    """One call.

    Attributes:
        problem: what to compute.
        cache: one layer, the latents of every row written, everything else full of large finite numbers.
        batch: of the step.
        query: [T, H, nope + rope].
        up: [kv_rank, H * (nope + value)].
        latents: for each row of the batch, dense [context, kv_rank + rope].
    """

    problem: MlaProblem
    cache: KVCache
    batch: BatchInputs
    query: Tensor
    up: Tensor
    latents: list[Tensor]


def make_latent_problem(
    heads: int = 3,
    kv_rank: int = 8,
    nope_dim: int = 6,
    rope_dim: int = 4,
    value_dim: int = 5,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
) -> MlaProblem:
    """A problem on CPU with the usual scale."""
    scale = 1 / math.sqrt(nope_dim + rope_dim)
    return MlaProblem("cpu", dtype, heads, kv_rank, nope_dim, rope_dim, value_dim, block_size, scale)


def make_latent_case(problem: MlaProblem, rows: list[tuple[int, int]], seed: int, poison: float = 1e4) -> LatentCase:
    """A case with rows of (start, count), whose blocks lie in random order.

    Args:
        problem: what to compute.
        rows: at least one.
        seed: of tables and numbers.
        poison: what unwritten places of the cache hold.
    """
    generator = torch.Generator().manual_seed(seed)
    width, size = problem.kv_rank + problem.rope_dim, problem.block_size
    needed = [-(-(start + count) // size) for start, count in rows]
    total = sum(needed) + 3
    cache = KVCache.allocate([LayerShape(1, width, 0)], total, size, problem.dtype, CPU)
    cache[0].key.fill_(poison)
    blocks = torch.randperm(total, generator=generator).numpy().astype(np.int32)
    table = np.full((len(rows), max(needed)), cache.scratch_block, dtype=np.int32)
    for row, count in enumerate(needed):
        table[row, :count], blocks = blocks[:count], blocks[count:]
    starts, counts = np.array(rows, dtype=np.int64).T
    index = build_index(StepRows(np.arange(len(rows)), starts, counts, np.ones(len(rows), dtype=np.bool_)), table, size)
    batch = to_inputs(index, torch.zeros(int(counts.sum()), dtype=torch.int64))
    latents = []
    for row, context in enumerate(batch.context_lens_host):
        latents.append(torch.randn((context, width), generator=generator).to(problem.dtype))
        places = np.arange(context)
        slots = torch.from_numpy(index.block_tables[row][places // size] * size + places % size)
        LatentCopy(problem).forward(latents[-1], cache[0], slots)
    made = problem.num_heads * (problem.nope_dim + problem.value_dim)
    up = torch.randn((problem.kv_rank, made), generator=generator) / math.sqrt(problem.kv_rank)
    query = torch.randn((batch.num_tokens, problem.num_heads, problem.nope_dim + problem.rope_dim), generator=generator)
    return LatentCase(problem, cache, batch, query.to(problem.dtype), up.to(problem.dtype), latents)


def dense_latent(case: LatentCase) -> Tensor:
    """Attention of each token and head by itself, in float64, with its own keys and values."""
    problem = case.problem
    out = torch.empty((*case.query.shape[:2], problem.value_dim), dtype=torch.float64)
    per_head = problem.nope_dim + problem.value_dim
    token = 0
    for row, (count, context) in enumerate(zip(case.batch.query_lens, case.batch.context_lens_host, strict=True)):
        for position in range(context - count, context):
            seen = case.latents[row][: position + 1].double()
            for head in range(problem.num_heads):
                up = case.up[:, head * per_head : (head + 1) * per_head].double()
                made = seen[:, : problem.kv_rank] @ up
                key = torch.cat((made[:, : problem.nope_dim], seen[:, problem.kv_rank :]), dim=1)
                weights = (key @ case.query[token, head].double() * problem.scale).softmax(0)
                out[token, head] = weights @ made[:, problem.nope_dim :]
            token += 1
    return out
