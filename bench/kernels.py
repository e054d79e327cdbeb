"""Kernels against the roofline (Williams et al., 2009): what they must move and compute, at the machine's own limits.

A case is one KernelCase; CASES lists what makes them. To measure another kernel, add a maker.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from bench.ceilings import Ceilings
from model_executor.attention.dispatch import KernelTable
from model_executor.attention.spec import AttentionProblem
from model_executor.batch import BatchInputs, DecodeGroup
from model_executor.kv_cache import LayerCache

BLOCK_SIZE: Final = 16
LEAST_S: Final = 0.4
FEWEST_ROUNDS: Final = 5
MOST_ROUNDS: Final = 1000


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's layers; the defaults are SmolLM2-135M's.

    Attributes:
        layers: how many there are; a case goes through as many copies of its data, as a step of the model does, so
            that what fits no cache there fits none here.
        hidden, intermediate: widths; heads, kv_heads, head_dim: of attention; vocab: rows of the head.
        context: tokens of each sequence in the cache.
    """

    layers: int = 30
    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    context: int = 272


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size.

    Attributes:
        name: in the table.
        bytes: that a call has to read and write at least.
        operations: multiplications and additions of a call.
        numbers: what is multiplied, a name in Ceilings.operations_per_s.
        run: a call; calls that follow each other work on different data.
    """

    name: str
    bytes: int
    operations: int
    numbers: str
    run: Callable[[], object]


def roofline_s(case: KernelCase, ceilings: Ceilings) -> float:
    """The least seconds that a call can take."""
    return max(case.bytes / ceilings.bytes_per_s, case.operations / ceilings.operations_per_s[case.numbers])


def seconds(case: KernelCase, calls: int) -> float:
    """Seconds of a call: median over rounds of `calls` calls, for LEAST_S in all."""
    for _ in range(calls):
        case.run()
    rounds: list[float] = []
    end = time.perf_counter() + LEAST_S
    while len(rounds) < FEWEST_ROUNDS or (time.perf_counter() < end and len(rounds) < MOST_ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            case.run()
        rounds.append(time.perf_counter() - began)
    return statistics.median(rounds) / calls


def measure_case(case: KernelCase, calls: int, ceilings: Ceilings) -> dict[str, Any]:
    """The figures of a case."""
    spent, least = seconds(case, calls), roofline_s(case, ceilings)
    moving = case.bytes / ceilings.bytes_per_s >= case.operations / ceilings.operations_per_s[case.numbers]
    return {
        "part": "kernels",
        "name": case.name,
        "us": 1e6 * spent,
        "bytes": case.bytes,
        "operations": case.operations,
        "gb_per_s": case.bytes / spent / 1e9,
        "gop_per_s": case.operations / spent / 1e9,
        "bound": "memory" if moving else "arithmetic",
        "fraction": least / spent,
    }


def matrix_products(shape: Shape, rows: int) -> Iterator[KernelCase]:
    """The products of a block, as torch computes them with the weight as (in, out)."""
    widths = {
        "qkv": (shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        "out": (shape.heads * shape.head_dim, shape.hidden),
        "gate and up": (shape.hidden, 2 * shape.intermediate),
        "down": (shape.intermediate, shape.hidden),
    }
    for name, (inputs, outputs) in widths.items():
        weights = [torch.randn(inputs, outputs) for _ in range(shape.layers)]
        x = torch.randn(rows, inputs)
        moved = 4 * (inputs * outputs + rows * (inputs + outputs))
        run = _in_turn(weights, x.matmul)
        yield KernelCase(f"torch {name}, {rows} rows", moved, 2 * rows * inputs * outputs, "float32", run)


def decode_attention(shape: Shape, rows: int) -> Iterator[KernelCase]:
    """Attention of one query a row over the paged cache, with the kernel that the registry chooses."""
    yield _attention(shape, rows, queries=1)


def prefill_attention(shape: Shape, rows: int) -> Iterator[KernelCase]:
    """Attention of whole prompts, with the kernel that the registry chooses."""
    yield _attention(shape, rows, queries=shape.context)


def _attention(shape: Shape, rows: int, queries: int) -> KernelCase:
    problem = AttentionProblem(
        device="cpu",
        dtype=torch.float32,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=BLOCK_SIZE,
        scale=shape.head_dim**-0.5,
    )
    table = KernelTable()
    kernel = table.attention(problem)
    batch = batch_of(rows, queries, shape.context)
    blocks = rows * -(-shape.context // BLOCK_SIZE) + 1
    size = (blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    caches = [LayerCache(torch.randn(size), torch.randn(size)) for _ in range(shape.layers)]
    query = torch.randn(rows * queries, shape.heads, shape.head_dim)
    kv_bytes = 4 * rows * shape.context * 2 * shape.kv_heads * shape.head_dim
    pairs = rows * sum(shape.context - back for back in range(queries))
    return KernelCase(
        name=f"{table.explain()[0].chosen} {'decode' if queries == 1 else 'prefill'}, {rows} rows of {shape.context}",
        bytes=kv_bytes + 2 * 4 * query.numel(),
        operations=4 * pairs * shape.heads * shape.head_dim,
        numbers="float32",
        run=_in_turn(caches, lambda cache: kernel.forward(query, cache, batch)),
    )


def batch_of(rows: int, queries: int, context: int) -> BatchInputs:
    """Rows of one length, each in blocks of its own that lie in no order."""
    each = -(-context // BLOCK_SIZE)
    tables = torch.randperm(rows * each, generator=torch.Generator().manual_seed(0)).reshape(rows, each)
    positions = torch.arange(context - queries, context).repeat(rows)
    slots = tables.repeat_interleave(queries, 0).gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0] * BLOCK_SIZE
    decodes = rows if queries == 1 else 0
    return BatchInputs(
        token_ids=torch.zeros(rows * queries, dtype=torch.int64),
        positions=positions,
        slot_mapping=slots + positions % BLOCK_SIZE,
        query_start=torch.arange(0, rows * queries + 1, queries),
        context_lens=torch.full((rows,), context),
        block_tables=tables,
        sample_index=torch.arange(queries - 1, rows * queries, queries),
        query_lens=[queries] * rows,
        context_lens_host=[context] * rows,
        num_decodes=decodes,
        decode_groups=(DecodeGroup(0, rows, context),) if decodes else (),
    )


def _in_turn(data: Sequence[Any], work: Callable[[Any], Tensor]) -> Callable[[], object]:
    turns = itertools.cycle(data)
    return lambda: work(next(turns))


# What makes the cases of so many rows.
CASES: Final[tuple[Callable[[Shape, int], Iterator[KernelCase]], ...]] = (
    matrix_products,
    decode_attention,
    prefill_attention,
)
