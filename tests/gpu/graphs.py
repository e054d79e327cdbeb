"""Captured graphs against the same steps run as they are."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch

from model_executor.batch import BatchInputs
from model_executor.graph import DEFAULT_BUCKETS, GraphRunner, GraphShape
from tests.gpu.cases import relative_error
from tests.gpu.models import SMALL, Model, batch_of, decode_batch, make
from tests.gpu.report import Report

# A padded product has other sums of float32; in bfloat16 each layer rounds them anew.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
BLOCKS = 2600


@torch.inference_mode()
def graphs(report: Report, shard: int, shards: int) -> None:
    """Every bucket edge, then steps of changing sizes on graphs that share one pool."""
    buckets = (1, 2, 4) if report.dry else DEFAULT_BUCKETS
    edges = sorted({bucket + more for bucket in buckets for more in (-1, 0, 1)} - {0})
    for dtype in (torch.bfloat16, torch.float32)[shard::shards]:
        model = make(SMALL, BLOCKS, dtype=dtype, device=report.device)
        runner = model.graphs(buckets)
        name = str(dtype).removeprefix("torch.")
        worst = max(_difference(model, runner, rows, rows) for rows in edges)
        report.check(f"{name}: bucket edges {edges[0]} .. {edges[-1]}", worst < TOLERANCE[dtype], f"error {worst:.1e}")
        rng = np.random.default_rng(0)
        sizes = rng.integers(1, buckets[-1] + 1, 8 if report.dry else 60).tolist()
        worst = max(_difference(model, runner, rows, seed) for seed, rows in enumerate(sizes))
        report.check(f"{name}: {len(sizes)} steps of any size", worst < TOLERANCE[dtype], f"error {worst:.1e}")
        report.note(f"{name}: what ran", "; ".join(runner.explain()))
        if report.device.type == "cuda":
            captures = runner.counts.captures
            report.check(f"{name}: graphs captured", captures == len(buckets), f"{captures} of {len(buckets)}")
        _check_prefill(report, model, runner, name)
        if dtype == torch.bfloat16:
            _check_experts(report)
    if report.device.type == "cuda":
        _check_waiting(report, model)


def _difference(model: Model, runner: GraphRunner, rows: int, seed: int) -> float:
    """Largest relative error of the graph's logits and of the blocks it wrote, on equal caches."""
    contexts = np.random.default_rng(seed).integers(1, 300, rows).tolist()
    batch = decode_batch(contexts, model.cache, SMALL.vocab, seed)
    twin = replace(model, cache=copy.deepcopy(model.cache))
    expected = twin.step(batch)
    result = runner.run(batch)
    errors = [relative_error(result, expected)]
    owned = model.cache.num_blocks
    for mine, theirs in zip(model.cache.layers, twin.cache.layers, strict=True):
        errors.append(relative_error(mine.key[:owned], theirs.key[:owned]))
        errors.append(relative_error(mine.value[:owned], theirs.value[:owned]))
    return max(errors)


def _check_prefill(report: Report, model: Model, runner: GraphRunner, name: str) -> None:
    """A mixed step does not go through a graph, and is the same as without a runner."""
    batch = batch_of(np.array([9, 0, 200]), np.array([1, 40, 3]), model.cache, SMALL.vocab, seed=5)
    same = torch.equal(runner.run(batch), model.step(batch))
    report.check(f"{name}: a mixed step runs as it is", same, f"equal {same}")


def _check_experts(report: Report) -> None:
    """Experts in graphs: without padding, since another rounding of the router's product may choose another expert."""
    model = make(replace(SMALL, experts=8), BLOCKS, dtype=torch.bfloat16, device=report.device)
    runner = model.graphs((1, 4, 32))
    worst = max(_difference(model, runner, rows, seed) for seed in range(3) for rows in (4, 1, 32))
    bound = TOLERANCE[torch.bfloat16]
    report.check("experts in graphs", worst < bound, f"error {worst:.1e}; {'; '.join(runner.explain())}")


def _check_waiting(report: Report, model: Model) -> None:
    """A step that waits for the device is not captured, and runs all the same."""

    def waiting(batch: BatchInputs) -> torch.Tensor:
        logits = model.step(batch)
        return logits if logits.sum().item() != 0.5 else -logits

    batch = decode_batch([9, 20, 30], model.cache, SMALL.vocab, seed=7)
    size = model.cache.block_size
    shape = GraphShape((4,), SMALL.max_len // size, size, model.cache.scratch_block)
    runner = GraphRunner(waiting, shape, report.device)
    same = relative_error(runner.run(batch), model.step(batch)) < TOLERANCE[model.decoder.embedding.weight.dtype]
    report.check("a step that waits is refused", same and runner.counts.captures == 0, "; ".join(runner.explain()))
