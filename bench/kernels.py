"""Kernels against the roofline (Williams et al., 2009): what they must move and compute, at the machine's own limits.

A case is one KernelCase; CASES lists what makes them, each with the kernel that the registry chooses for a float32
model on this machine. To measure another kernel, add a maker. What must be moved is counted as if nothing were in a
cache: where the numbers of a small case are in one, more than the whole of the memory's speed can be reached.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from bench.ceilings import Ceilings
from model_executor.attention.dispatch import KernelTable
from model_executor.attention.spec import AttentionProblem
from model_executor.batch import BatchInputs, DecodeGroup
from model_executor.huge_pages import Arena
from model_executor.kv_cache import LayerCache
from model_executor.layers.heads import HeadsProblem
from model_executor.layers.linear import Linear, LinearProblem
from model_executor.layers.norm import NormProblem
from model_executor.layers.rotary import Rotary
from model_executor.models.spec import RopeSpec
from model_executor.native.library import Native

BLOCK_SIZE: Final = 16
HEAD_COPIES: Final = 2
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


def products(native: Native | None, shape: Shape, rows: int) -> Iterator[KernelCase]:
    """The products of a block and the head, in float32 and but for the head in int8."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    for int8 in (False, True):
        yield _product(native, "qkv", _linear(shape.hidden, qkv, int8=int8), rows, shape.layers)
        yield _product(
            native, "out", _linear(shape.heads * shape.head_dim, shape.hidden, int8=int8), rows, shape.layers
        )
        gate_up = dataclasses.replace(_linear(shape.hidden, 2 * shape.intermediate, int8=int8), gate="silu")
        yield _product(native, "gate and up", gate_up, rows, shape.layers)
        yield _product(native, "down", _linear(shape.intermediate, shape.hidden, int8=int8), rows, shape.layers)
    yield _product(native, "head", _linear(shape.hidden, shape.vocab, int8=False), rows, HEAD_COPIES)


def _linear(inputs: int, outputs: int, *, int8: bool) -> LinearProblem:
    return LinearProblem("cpu", torch.float32, inputs, outputs, bias=False, int8=int8)


def _product(native: Native | None, part: str, problem: LinearProblem, rows: int, copies: int) -> KernelCase:
    table = KernelTable(native=native)
    kernel = table.linear(problem)
    layers = [
        Linear(
            *(problem.inputs, problem.outputs),
            bias=False,
            dtype=torch.float32,
            device=torch.device("cpu"),
            gate=problem.gate,
            kernel=kernel,
        )
        for _ in range(copies)
    ]
    for layer in layers:
        # Like the weights of most checkpoints, these have a bfloat16's digits.
        layer.weight.copy_(torch.randn(problem.inputs, problem.outputs).bfloat16())
        layer.pack()
    kept = layers[0].product
    held = kept.packed.nbytes if kept else layers[0].weight.nbytes
    width = problem.outputs // (2 if problem.gate else 1)
    x = torch.randn(rows, problem.inputs)
    return KernelCase(
        name=f"{table.explain()[0].chosen} {part}{' in int8' if problem.int8 else ''}, {rows} rows",
        bytes=held + 4 * rows * (problem.inputs + width),
        operations=2 * rows * problem.inputs * problem.outputs,
        numbers="int8" if problem.int8 else "float32",
        run=_in_turn(layers, lambda layer: layer(x)),
    )


def norm(native: Native | None, shape: Shape, rows: int) -> Iterator[KernelCase]:
    """The norm before attention and before the feed-forward part."""
    table = KernelTable(native=native)
    kernel = table.norm(NormProblem("cpu", torch.float32, shape.hidden, offset=False, eps=1e-5))
    hidden = [torch.randn(rows, shape.hidden) for _ in range(shape.layers)]
    weight = torch.randn(shape.hidden)
    yield KernelCase(
        name=f"{table.explain()[0].chosen} norm, {rows} rows",
        bytes=4 * (2 * rows + 1) * shape.hidden,
        operations=4 * rows * shape.hidden,
        numbers="float32",
        run=_in_turn(hidden, lambda x: kernel.forward(x, weight)),
    )


def rotation_and_append(native: Native | None, shape: Shape, rows: int) -> Iterator[KernelCase]:
    """What stands between the projection of one token of each row and its attention, where one kernel does it."""
    table = KernelTable(native=native)
    kernel = table.heads(_heads_problem(shape))
    if kernel is None:
        return
    spec = RopeSpec(kind="default", theta=10000.0, rotary_dim=shape.head_dim, reach=shape.context)
    batch = batch_of(rows, 1, shape.context)
    rotation = Rotary(spec, shape.context, torch.float32, torch.device("cpu"))(batch.positions)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    data = [(torch.randn(rows, width), cache) for cache in _caches(shape, rows)]
    yield KernelCase(
        name=f"{table.explain()[-1].chosen} rotation and append, {rows} rows",
        bytes=4 * rows * 2 * width,
        operations=3 * rows * (shape.heads + shape.kv_heads) * shape.head_dim,
        numbers="float32",
        run=_in_turn(data, lambda one: kernel.forward(one[0], rotation, None, one[1], batch)),
    )


def decode_attention(native: Native | None, shape: Shape, rows: int) -> Iterator[KernelCase]:
    """Attention of one query a row over the paged cache."""
    yield _attention(native, shape, rows, queries=1)


def prefill_attention(native: Native | None, shape: Shape, rows: int) -> Iterator[KernelCase]:
    """Attention of whole prompts."""
    yield _attention(native, shape, rows, queries=shape.context)


def _heads_problem(shape: Shape) -> HeadsProblem:
    sizes = (shape.heads, shape.kv_heads, shape.head_dim)
    return HeadsProblem("cpu", torch.float32, *sizes, BLOCK_SIZE, rope="rope", qk_norm=False)


def _attention_problem(shape: Shape, table: KernelTable) -> AttentionProblem:
    before = table.heads(_heads_problem(shape))
    return AttentionProblem(
        device="cpu",
        dtype=torch.float32,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=BLOCK_SIZE,
        scale=shape.head_dim**-0.5,
        layout="plain" if before is None else before.layout,
    )


def _caches(shape: Shape, rows: int) -> list[LayerCache]:
    """A layer's cache for each layer, with room for so many rows, in memory as the executor takes it."""
    size = (rows * -(-shape.context // BLOCK_SIZE) + 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    memory = Arena()

    def drawn() -> Tensor:
        return memory.take(4 * math.prod(size)).view(torch.float32).view(size).normal_()

    return [LayerCache(drawn(), drawn()) for _ in range(shape.layers)]


def _attention(native: Native | None, shape: Shape, rows: int, queries: int) -> KernelCase:
    table = KernelTable(native=native)
    kernel = table.attention(_attention_problem(shape, table))
    batch = batch_of(rows, queries, shape.context)
    query = torch.randn(rows * queries, shape.heads, shape.head_dim)
    kv_bytes = 4 * rows * shape.context * 2 * shape.kv_heads * shape.head_dim
    pairs = rows * sum(shape.context - back for back in range(queries))
    return KernelCase(
        name=f"{table.explain()[-1].chosen} {'decode' if queries == 1 else 'prefill'}, {rows} rows of {shape.context}",
        bytes=kv_bytes + 2 * 4 * query.numel(),
        operations=4 * pairs * shape.heads * shape.head_dim,
        numbers="float32",
        run=_in_turn(_caches(shape, rows), lambda cache: kernel.forward(query, cache, batch)),
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


Maker: TypeAlias = Callable[[Native | None, Shape, int], Iterator[KernelCase]]
# What makes the cases of so many rows of one token.
CASES: Final[tuple[Maker, ...]] = (products, norm, rotation_and_append, decode_attention, prefill_attention)
# And of so many tokens of prompts.
TOKEN_CASES: Final[tuple[Maker, ...]] = (products, norm)
