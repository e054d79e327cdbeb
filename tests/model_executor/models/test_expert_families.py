"""Every family with experts against transformers on a folder that transformers wrote: logits, tokens, blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.wire.config import CacheOptions, EngineConfig, ExecutorOptions, ModelOptions, SchedulerOptions
from engine_core.wire.executor import ExecutorReady, Shutdown, StepResult
from model_executor.batch import BatchInputs, StepRows, build_index, to_inputs
from model_executor.graph import GraphRunner, GraphShape
from model_executor.kv_cache import KVCache, LayerShape
from model_executor.models.decoder import Decoder
from model_executor.models.registry import family
from model_executor.weights.layer_plan import plan_layers
from model_executor.weights.parameters import block_parameters, outer_parameters
from tests.fixtures.expert_families import FAMILIES, SPARSE, VOCAB, keep_blocks, read_tensors, rewrite, write_experts
from tests.fixtures.reference import Continuation, Reference, prompts
from tests.model_executor.driver import Driver, Job
from tests.model_executor.engine import CPU, draw, load
from tests.model_executor.executor_process import DEADLINE_S, executor_process

TOLERANCE = 1e-4
KEPT = [0, 3, 5]
PROMPT = np.random.default_rng(5).integers(0, VOCAB, 40).tolist()
BLOCKS, BLOCK_SIZE = 200, 4
TOKEN_BYTES = {"mixtral": 2 * 2 * 8, "qwen3-moe": 2 * 2 * 16}
WINDOWS = {"mixtral": 9}
OPERATORS = {
    "mixtral": ["attention", "kv_append", "experts"],
    "qwen3-moe": ["attention", "kv_append", "experts"],
}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp(name) / "model", name)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_logits_whole_and_in_chunks(folder: Path, reference: Reference) -> None:
    expected = reference.logits(PROMPT)
    assert expected.std() > 0.3
    loaded = load(folder)
    for chunk in (None, 1, 4, 7):
        assert np.abs(loaded.logits(PROMPT, chunk=chunk) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("keep", [KEPT, [0, 1], [0, 1, 2, 3], [4, 1]], ids=str)
def test_choices_of_blocks_keep_their_kind(folder: Path, name: str, keep: list[int]) -> None:
    """Dense and sparse go by the source, so the border lies where the chosen blocks have it."""
    reference = Reference(folder)
    keep_blocks(reference.model, keep)
    loaded = load(folder, keep)
    sparse = [kind.endswith("+moe") for kind in loaded.plan.classes]
    assert sparse == [SPARSE[name][source] for source in keep]
    assert np.abs(loaded.logits(PROMPT, chunk=9) - reference.logits(PROMPT)).max() <= TOLERANCE


def test_classes_tell_attention_and_feed_forward_apart(folder: Path, name: str) -> None:
    for layer, sparse in zip(load(folder).spec.layers, SPARSE[name], strict=True):
        assert layer.class_name.startswith("mla-" if "deepseek" in name else "grouped-")
        assert layer.class_name.endswith("+moe" if sparse else "+gated")


@pytest.mark.parametrize("chosen", [None, KEPT], ids=str)
def test_parameters_are_those_of_model_and_checkpoint(folder: Path, chosen: list[int] | None) -> None:
    loaded = load(folder, chosen)
    names = family(loaded.spec.architecture).names
    plan = plan_layers(loaded.spec, chosen)
    table = (*outer_parameters(loaded.spec, names), *block_parameters(loaded.spec, plan, names))
    built = {own: tuple(parameter.shape) for own, parameter in loaded.model.named_parameters()}
    assert {parameter.name: parameter.shape for parameter in table} == built
    sources = {source.name: source.shape for parameter in table for source in parameter.sources}
    stored = {tensor: values.shape for tensor, values in read_tensors(folder).items()}
    assert sources.items() <= stored.items()
    assert loaded.report.bytes_read == sum(4 * int(np.prod(shape)) for shape in sources.values())
    assert loaded.report.bytes_materialized == loaded.report.bytes_read
    if chosen is None:
        assert sources == stored


def test_one_shard_a_tensor(name: str, tmp_path: Path) -> None:
    """Shards of blocks and experts that are not needed may be gone."""
    folder = write_experts(tmp_path, name)
    expected = load(folder, KEPT).logits(PROMPT)
    tensors = read_tensors(folder)
    rewrite(folder, tensors, shards=len(tensors))
    for file in load(folder, KEPT).report.shards_skipped:
        (folder / file).unlink()
    assert np.array_equal(load(folder, KEPT).logits(PROMPT), expected)


def test_dummy_weights_stay_finite(folder: Path) -> None:
    scores = draw(folder, dtype=torch.bfloat16).logits(PROMPT)
    assert np.isfinite(scores).all()
    assert scores.std() > 0.05


def test_bfloat16_stays_near(folder: Path) -> None:
    exact = load(folder).logits(PROMPT)
    near = load(folder, dtype=torch.bfloat16).logits(PROMPT)
    # A near tie of two experts may fall the other way at single positions.
    assert np.median(np.abs(near - exact).max(axis=1)) < 0.15


# What the rest of the file says of a family is the same in this process; these two differ most.
SERVED = [pytest.param(name, marks=() if name in ("mixtral", "deepseek-v3") else pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("name", SERVED, indirect=True, scope="module")
def test_greedy_tokens_over_the_wire(folder: Path, name: str, reference: Reference, tmp_path: Path) -> None:
    """A real executor, two plans ahead, prompts in chunks, prefill and decode mixed."""
    continuations = clear_continuations(reference, 4, 32)
    config = EngineConfig(
        model=ModelOptions(model=str(folder), max_model_len=100),
        cache=CacheOptions(block_size=BLOCK_SIZE, num_kv_blocks=BLOCKS),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=128),
        executor=ExecutorOptions(device="cpu", cpu_threads=1),
    )
    with executor_process(tmp_path, config) as (core, child):
        _, ready = core.until(ExecutorReady)
        driver = Driver(
            core.send,
            lambda: core.until(StepResult)[1],
            groups=ready.kv_groups,
            block_size=BLOCK_SIZE,
            chunk=7,
            depth=2,
        )
        jobs = [Job(list(item.prompt), 32, arrives=1 + 2 * index) for index, item in enumerate(continuations)]
        driver.run(jobs)
        core.send(Shutdown())
        assert child.wait(DEADLINE_S) == 0
    assert [job.output for job in jobs] == [list(item.token_ids) for item in continuations]
    # The latent and the rotated part of one key.
    token_bytes = 6 * 4 * TOKEN_BYTES.get(name, 20 + 6)
    assert [group.window for group in ready.kv_groups] == [WINDOWS.get(name)]
    assert ready.memory["kv_cache"] == token_bytes * (ready.num_kv_blocks + 1) * BLOCK_SIZE
    operators = OPERATORS.get(name, ["mla_attention", "kv_append", "experts"])
    chosen = {choice.operator for choice in ready.kernels}
    # Whether one kernel does all before the attention depends on the machine.
    assert chosen - {"heads", "kv_append"} == {*operators, "linear", "norm"} - {"kv_append"}


def clear_continuations(reference: Reference, count: int, tokens: int) -> list[Continuation]:
    """Greedy continuations without near ties."""
    clear: list[Continuation] = []
    for prompt in prompts(20, vocab=VOCAB, seed=6, longest=40):
        continuation = reference.greedy(prompt, tokens)
        if continuation.clear():
            clear.append(continuation)
        if len(clear) == count:
            return clear
    raise AssertionError(f"{len(clear)} of {count} prompts have clear answers")


@torch.inference_mode()
def test_padded_buckets_equal_eager(folder: Path) -> None:
    """Padding rows pass experts and attention too; they must leave the rows that count alone."""
    loaded = load(folder)
    results = []
    for padded in (False, True):
        shapes = [LayerShape.of(layer.attention) for layer in loaded.spec.layers]
        cache = KVCache.allocate(shapes, 8, BLOCK_SIZE, torch.float32, CPU)
        step = forward(loaded.model, cache)
        shape = GraphShape((4,), 8, BLOCK_SIZE, cache.scratch_block)
        graphs = GraphRunner(step, shape, CPU, enabled=padded)
        rows = [graphs.run(decode_batch(position)) for position in range(5)]
        assert graphs.counts.padded_rows == (5 if padded else 0)
        results.append(torch.stack(rows))
    assert results[0].shape == (5, 3, VOCAB)
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-4)


def test_a_model_tells_whether_it_waits_for_the_device(folder: Path, name: str) -> None:
    dense = [source for source, sparse in enumerate(SPARSE[name]) if not sparse]
    assert load(folder).model.waits_for_device
    if dense:
        assert not load(folder, dense).model.waits_for_device


def forward(model: Decoder, cache: KVCache) -> Callable[[BatchInputs], torch.Tensor]:
    return lambda batch: model.logits(model(batch, cache)[batch.sample_index])


def decode_batch(position: int) -> BatchInputs:
    """Three rows of one token each, at this position; every row has two blocks."""
    table = np.arange(6, dtype=np.int32).reshape(3, 2)
    three = np.ones(3, dtype=np.int64)
    rows = StepRows(np.arange(3), three * position, three, three > 0)
    ids = torch.tensor([11, 5, 60]) + position
    return to_inputs(build_index(rows, table, BLOCK_SIZE), ids)
