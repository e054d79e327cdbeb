"""Triton attention in the interpreter against the oracle. The caches hold NaN wherever no row owns the position."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from model_executor.attention import triton_paged
from model_executor.attention.triton_paged import Device, Split, Tiles, TritonPaged
from model_executor.batch import BatchInputs
from model_executor.graph import GraphShape, StaticBatch
from model_executor.kv_cache import LayerCache
from tests.gpu.cases import SHAPES, TOLERANCE, Case, Shape, build, relative_error
from tests.model_executor import interpreted  # noqa: F401 - before the kernels are made

CPU = torch.device("cpu")
HOPPER = Device(processors=132, shared_memory=232448)
# Few splits: the interpreter takes its time for each program, idle or not.
SMALL = Device(processors=6, shared_memory=HOPPER.shared_memory)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def attend(case: Case, device: Device = SMALL) -> torch.Tensor:
    return TritonPaged(case.problem, device).forward(case.query, case.cache, case.batch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle(shape: Shape) -> None:
    case = build(shape, CPU, seed=1)
    assert relative_error(attend(case), case.expected()) < TOLERANCE[shape.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_equals_the_oracle_at_random(seed: int) -> None:
    shape = random_shape(random.Random(seed))
    case = build(shape, CPU, seed)
    assert relative_error(attend(case), case.expected()) < TOLERANCE[shape.dtype], shape


def random_shape(draw: random.Random) -> Shape:
    kv_heads = draw.choice((1, 2, 3))
    return Shape(
        rows=tuple(
            (draw.choice((0, draw.randrange(300))), draw.choice((1, 1, draw.randrange(1, 90)))) for _ in range(4)
        ),
        heads=kv_heads * draw.choice((1, 2, 3, 5, 8)),
        kv_heads=kv_heads,
        head_dim=draw.choice((64, 72, 80, 96, 112, 128, 160, 192, 256)),
        block_size=draw.choice((16, 32, 64, 128)),
        window=draw.choice((None, draw.randrange(1, 200))),
        soft_cap=draw.choice((None, 20.0)),
        dtype=draw.choice((F32, F16, BF16)),
    )


@pytest.mark.parametrize("processors", [1, 16, pytest.param(132, marks=pytest.mark.slow), 2000])
def test_any_split_of_the_context_gives_the_same(processors: int) -> None:
    case = build(Shape(rows=((700, 1), (63, 1), (0, 1)), heads=4, kv_heads=2), CPU, seed=2)
    output = attend(case, Device(processors, HOPPER.shared_memory))
    assert relative_error(output, case.expected()) < TOLERANCE[F32]


def test_a_row_without_context_gives_zeros() -> None:
    case = build(Shape(rows=((20, 1), (3, 1))), CPU, seed=3)
    # Rows are sorted by falling context; the last one becomes padding that owns nothing.
    lens = case.batch.context_lens.clone()
    lens[-1] = 0
    output = attend(dataclasses.replace(case, batch=dataclasses.replace(case.batch, context_lens=lens)))
    assert relative_error(output[0], case.expected()[0]) < TOLERANCE[F32]
    assert (output[1] == 0).all()


@pytest.mark.parametrize("window", [None, 5])
def test_padding_rows_change_nothing(window: int | None) -> None:
    """The batch that would be captured: padded, and without lengths on the host."""
    case = build(Shape(rows=((40, 1), (7, 1), (90, 1)), window=window), CPU, seed=4)
    blocks, size = case.cache.key.shape[0], case.cache.block_size
    cache = LayerCache(*(torch.cat((x, torch.zeros_like(x[:1]))) for x in (case.cache.key, case.cache.value)))
    static = StaticBatch(GraphShape((8,), max_blocks=10, block_size=size, scratch_block=blocks), CPU)
    static.fill(case.batch)
    kernel = TritonPaged(case.problem, SMALL)
    query = torch.cat((case.query, torch.randn(5, *case.query.shape[1:])))
    output = kernel.forward(query, cache, static.for_capture(8))
    assert relative_error(output[:3], case.expected()) < TOLERANCE[F32]
    assert output.isfinite().all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = build(Shape(rows=((30, 20), (0, 50), (77, 3)), heads=2), CPU, seed=5)
    alone = [_only(case.batch, row) for row in range(3)]
    whole = attend(case)
    first = 0
    for batch in alone:
        last = first + batch.query_lens[0]
        part = attend(dataclasses.replace(case, batch=batch, query=case.query[first:last]))
        assert torch.equal(part, whole[first:last])
        first = last


def _only(batch: BatchInputs, row: int) -> BatchInputs:
    return dataclasses.replace(
        batch,
        query_start=torch.tensor([0, batch.query_lens[row]]),
        context_lens=batch.context_lens[row : row + 1],
        block_tables=batch.block_tables[row : row + 1],
        query_lens=[batch.query_lens[row]],
        context_lens_host=[batch.context_lens_host[row]],
        derived={},
    )


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 128, 4096])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_split_fills_the_device(rows: int, kv_heads: int) -> None:
    split = Split.of(rows, kv_heads, HOPPER.processors)
    assert split.parts.bit_count() == split.tiles.bit_count() == 1
    assert split.parts in {triton_paged.FEWEST_SPLITS, triton_paged.MOST_SPLITS} or (
        HOPPER.processors * 4 <= rows * kv_heads * split.parts < HOPPER.processors * 8
    )


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 71, 128])
def test_tiles_are_powers_of_two_that_hold_the_heads(dtype: torch.dtype, head_dim: int, group: int) -> None:
    problem = build(Shape(rows=((0, 1),), heads=group, kv_heads=1, head_dim=head_dim, dtype=dtype), CPU, 0).problem
    tiles = Tiles.of(problem, HOPPER.shared_memory)
    assert all(n.bit_count() == 1 and n >= 16 for n in (tiles.heads, tiles.queries, tiles.keys, tiles.head_dim))
    assert tiles.head_dim >= head_dim
    assert tiles.heads >= group
    assert tiles.queries >= tiles.heads


@pytest.mark.parametrize(("head_dim", "queries"), [(64, 128), (128, 128), (256, 64)])
def test_less_shared_memory_takes_fewer_wide_queries(head_dim: int, queries: int) -> None:
    problem = build(Shape(rows=((0, 1),), head_dim=head_dim, dtype=BF16), CPU, 0).problem
    assert Tiles.of(problem, 101_376).queries == queries
    assert Tiles.of(problem, HOPPER.shared_memory).queries == 128


def test_limits_are_told() -> None:
    problem = build(Shape(rows=((0, 1),)), CPU, 0).problem
    assert triton_paged.SPEC.reject(problem) == ("device cpu: runs on cuda",)
    on_gpu = dataclasses.replace(problem, device="cuda")
    assert triton_paged.SPEC.reject(on_gpu) == ()
    wrong = dataclasses.replace(on_gpu, head_dim=264, block_size=8, dtype=torch.float64)
    assert len(triton_paged.SPEC.reject(wrong)) == 3
