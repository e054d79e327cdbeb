"""Random attention problems over a paged cache, and dense attention to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_executor.attention.spec import AttentionProblem
from model_executor.attention.torch_ref import IndexCopyAppend
from model_executor.batch import BatchInputs, StepRows, build_index, to_inputs
from model_executor.kv_cache import KVCache, LayerShape

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes:
        problem: what to compute.
        cache: one layer, keys and values of every row written, everything else full of large finite numbers.
        batch: of the step.
        query: [T, H, D].
        keys, values: for each row of the batch, dense [context, KH, D].
    """

    problem: AttentionProblem
    cache: KVCache
    batch: BatchInputs
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_case(problem: AttentionProblem, rows: list[tuple[int, int]], seed: int, poison: float = 1e4) -> Case:
    """A case with rows of (start, count), whose blocks lie in random order.

    Args:
        problem: what to compute.
        rows: at least one.
        seed: of tables and numbers.
        poison: what unwritten places of the cache hold.
    """
    generator = torch.Generator().manual_seed(seed)
    contexts = [start + count for start, count in rows]
    needed = [-(-context // problem.block_size) for context in contexts]
    total = sum(needed) + 3
    cache = KVCache.allocate(
        [LayerShape(problem.num_kv_heads, problem.head_dim)], total, problem.block_size, problem.dtype, CPU
    )
    cache[0].key.fill_(poison)
    cache[0].value.fill_(poison)
    blocks = torch.randperm(total, generator=generator).numpy().astype(np.int32)
    table = np.full((len(rows), max(needed)), cache.scratch_block, dtype=np.int32)
    for row, count in enumerate(needed):
        table[row, :count], blocks = blocks[:count], blocks[count:]
    starts, counts = np.array(rows, dtype=np.int64).T
    plan = StepRows(np.arange(len(rows)), starts, counts, np.ones(len(rows), dtype=np.bool_))
    index = build_index(plan, table, problem.block_size)
    batch = to_inputs(index, torch.zeros(int(counts.sum()), dtype=torch.int64))
    query = _normal((batch.num_tokens, problem.num_heads, problem.head_dim), problem, generator)
    keys, values = [], []
    for row, context in enumerate(batch.context_lens_host):
        shape = (context, problem.num_kv_heads, problem.head_dim)
        keys.append(_normal(shape, problem, generator))
        values.append(_normal(shape, problem, generator))
        places = np.arange(context)
        slots = index.block_tables[row][places // problem.block_size] * problem.block_size
        slots = torch.from_numpy(slots + places % problem.block_size)
        IndexCopyAppend(problem).forward(keys[-1], values[-1], cache[0], slots)
    return Case(problem, cache, batch, query, keys, values)


def dense(case: Case) -> Tensor:
    """Attention of each token by itself, in float64, from the dense keys and values."""
    problem, batch = case.problem, case.batch
    out = torch.empty(case.query.shape, dtype=torch.float64)
    token = 0
    for row, (count, context) in enumerate(zip(batch.query_lens, batch.context_lens_host, strict=True)):
        for position in range(context - count, context):
            first = 0 if problem.window is None else max(0, position - problem.window + 1)
            for head in range(problem.num_heads):
                kv_head = head * problem.num_kv_heads // problem.num_heads
                key = case.keys[row][first : position + 1, kv_head].double()
                scores = key @ case.query[token, head].double() * problem.scale
                if problem.soft_cap is not None:
                    scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
                weights = torch.exp(scores - scores.max())
                value = case.values[row][first : position + 1, kv_head].double()
                out[token, head] = (weights / weights.sum()) @ value
            token += 1
    return out


def make_problem(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
) -> AttentionProblem:
    """A problem on CPU with the usual scale."""
    return AttentionProblem(
        "cpu", dtype, heads, kv_heads, head_dim, block_size, 1 / math.sqrt(head_dim), window, soft_cap
    )


def _normal(shape: tuple[int, ...], problem: AttentionProblem, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(problem.dtype)
