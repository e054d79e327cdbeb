"""Buckets and padding, on the same buffers that CUDA graphs use."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from model_executor.attention.torch_sdpa import TorchSdpa
from model_executor.batch import BatchInputs
from model_executor.graph import DEFAULT_BUCKETS, GraphRunner, GraphShape, HostRead, StaticBatch, bucket_sizes
from tests.gpu.cases import Shape, build, relative_error
from tests.gpu.models import SMALL, Model, batch_of, decode_batch, make

CPU = torch.device("cpu")
BUCKETS = (1, 2, 4, 8)
EDGES = sorted({rows + more for rows in BUCKETS for more in (-1, 0, 1)} - {0})
# Padding changes the row count of a matrix product, and with it the order of some sums.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def model() -> Model:
    return make(SMALL, 200, dtype=torch.float32, device=CPU)


def copied(model: Model) -> Model:
    """The same weights, a cache of its own."""
    return dataclasses.replace(model, cache=copy.deepcopy(model.cache))


def contexts(rows: int) -> list[int]:
    return [(37 * row) % 150 + 1 for row in range(rows)]


def same_cache(one: Model, other: Model) -> bool:
    """Whether all blocks but the scratch block are equal up to rounding."""
    pairs = [
        (a[: one.cache.num_blocks], b[: one.cache.num_blocks])
        for mine, theirs in zip(one.cache.layers, other.cache.layers, strict=True)
        for a, b in ((mine.key, theirs.key), (mine.value, theirs.value))
    ]
    return all(relative_error(a, b) < ROUNDING for a, b in pairs)


@torch.inference_mode()
@pytest.mark.parametrize("rows", EDGES)
@pytest.mark.parametrize("sampling", [None, 1])
def test_every_bucket_edge_equals_eager(model: Model, rows: int, sampling: int | None) -> None:
    eager, padded = copied(model), copied(model)
    batch = decode_batch(contexts(rows), model.cache, SMALL.vocab, seed=rows, width=sampling)
    expected = eager.step(batch)
    graphs = padded.graphs(BUCKETS)
    result = graphs.run(batch)
    assert result.shape == expected.shape
    assert relative_error(result, expected) < ROUNDING
    assert same_cache(eager, padded)
    fits = rows <= BUCKETS[-1]
    bucket = min(size for size in BUCKETS if size >= rows) if fits else 0
    assert graphs.counts.replays == ({bucket: 1} if fits else {})
    assert graphs.counts.eager == ({} if fits else {"more than 8 rows": 1})


@torch.inference_mode()
def test_what_a_step_left_in_the_buffers_does_not_reach_the_next(model: Model) -> None:
    own = copied(model)
    graphs = own.graphs(BUCKETS)
    for seed, rows in enumerate((8, 3, 1, 5, 2, 8, 1)):
        batch = decode_batch(contexts(rows), model.cache, SMALL.vocab, seed, width=max(1, rows - seed))
        fresh = copied(own).graphs(BUCKETS).run(batch)
        assert torch.equal(graphs.run(batch), fresh)


@torch.inference_mode()
def test_steps_with_longer_rows_run_as_they_are(model: Model) -> None:
    starts, counts = torch.tensor([5, 0, 30]).numpy(), torch.tensor([1, 7, 1]).numpy()
    batch = batch_of(starts, counts, model.cache, SMALL.vocab, seed=1)
    graphs = copied(model).graphs(BUCKETS)
    assert torch.equal(graphs.run(batch), copied(model).step(batch))
    assert graphs.counts.eager == {"rows of several tokens": 1}
    assert graphs.counts.replays == {}


@torch.inference_mode()
def test_graphs_can_be_switched_off(model: Model) -> None:
    batch = decode_batch(contexts(3), model.cache, SMALL.vocab, seed=1)
    graphs = copied(model).graphs(BUCKETS, enabled=False)
    assert torch.equal(graphs.run(batch), copied(model).step(batch))
    assert graphs.counts.eager == {"graphs are switched off": 1}
    assert graphs.explain() == [
        "no graphs: graphs are switched off",
        "1 steps run as they are: graphs are switched off",
    ]


@torch.inference_mode()
def test_explains_what_ran_how(model: Model) -> None:
    graphs = copied(model).graphs(BUCKETS)
    for rows in (3, 4, 9):
        graphs.run(decode_batch(contexts(rows), model.cache, SMALL.vocab, seed=rows))
    graphs.warm_up(lambda done, total: None)
    assert graphs.explain() == [
        "decode steps of up to 8 rows: replayed on static buffers, padded to [1, 2, 4, 8]",
        "2 steps of 4 rows replayed",
        "1 steps run as they are: more than 8 rows",
    ]
    assert graphs.counts.padded_rows == 1


def test_padding_writes_the_scratch_block_only() -> None:
    seen: list[BatchInputs] = []

    def step(batch: BatchInputs) -> Tensor:
        seen.append(batch)
        return torch.zeros(batch.sample_index.shape[0], 3)

    case = build(Shape(rows=((40, 1), (7, 1), (90, 1))), CPU, seed=1)
    shape = GraphShape((8,), max_blocks=9, block_size=16, scratch_block=77)
    assert GraphRunner(step, shape, CPU).run(case.batch).shape == (3, 3)
    (batch,) = seen
    assert torch.equal(batch.slot_mapping[:3], case.batch.slot_mapping)
    assert (batch.slot_mapping[3:] == 77 * 16).all()
    assert (batch.block_tables[3:] == 77).all()
    assert (batch.context_lens[3:] == 1).all()
    assert (batch.positions[3:] == 0).all()
    assert torch.equal(batch.query_start, torch.arange(9))
    assert torch.equal(batch.block_tables[:3, : case.batch.block_tables.shape[1]], case.batch.block_tables)
    assert batch.query_lens == [1] * 8
    assert batch.context_lens_host == [91, 41, 8, 1, 1, 1, 1, 1]
    assert [(group.first, group.last) for group in batch.decode_groups][-1] == (3, 8)


def test_each_group_is_padded_with_its_own_scratch_block() -> None:
    case = build(Shape(rows=((40, 1), (7, 1), (90, 1))), CPU, seed=1)
    more = case.batch.with_groups([(case.batch.slot_mapping + 1, case.batch.block_tables + 2)])
    static = StaticBatch(GraphShape((8,), 9, 16, 77, other_scratch_blocks=(5,)), CPU)
    static.fill(more)
    for batch in (static.for_host(more, 8), static.for_capture(8)):
        seen = batch.of_group(1)
        assert torch.equal(seen.slot_mapping[:3], case.batch.slot_mapping + 1)
        assert torch.equal(seen.block_tables[:3, : case.batch.block_tables.shape[1]], case.batch.block_tables + 2)
        assert (seen.slot_mapping[3:] == 5 * 16).all()
        assert (seen.block_tables[3:] == 5).all()
        assert (batch.slot_mapping[3:] == 77 * 16).all()
        assert (batch.block_tables[3:] == 77).all()


def test_a_kernel_that_reads_lengths_on_the_host_is_found_out() -> None:
    case = build(Shape(rows=((40, 1), (7, 1))), CPU, seed=1)
    static = StaticBatch(GraphShape((2,), max_blocks=9, block_size=16, scratch_block=0), CPU)
    static.fill(case.batch)
    batch = static.for_capture(2)
    with pytest.raises(HostRead, match="reads lengths on the host"):
        TorchSdpa(case.problem).forward(case.query, case.clean, batch)
    for lengths in (batch.query_lens, batch.context_lens_host, batch.decode_groups):
        with pytest.raises(HostRead):
            len(lengths)
        with pytest.raises(HostRead):
            list(lengths)
        with pytest.raises(HostRead):
            lengths[0]


@pytest.mark.parametrize(
    ("requested", "most", "expected"),
    [
        ((), 128, DEFAULT_BUCKETS),
        ((), 1, (1,)),
        ((), 100, (1, 2, 4, 8, 16, 32, 64, 100)),
        ((), 4096, DEFAULT_BUCKETS),
        ((8, 3, 8), 10, (3, 8)),
        ((16,), 10, (10,)),
    ],
)
def test_bucket_sizes(requested: tuple[int, ...], most: int, expected: tuple[int, ...]) -> None:
    assert bucket_sizes(requested, most) == expected
