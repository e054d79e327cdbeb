"""Every dense family against transformers on a folder that transformers wrote: logits, tokens, choices of blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.wire.config import CacheOptions, EngineConfig, ExecutorOptions, ModelOptions, SchedulerOptions
from engine_core.wire.executor import ExecutorReady, Shutdown, StepResult
from model_executor.models.registry import family
from model_executor.weights.layer_plan import plan_layers
from model_executor.weights.parameters import block_parameters, outer_parameters
from tests.fixtures.families import FAMILIES, KEPT, VOCAB, keep_layers, write_family
from tests.fixtures.reference import Continuation, Reference, prompts
from tests.model_executor.driver import Driver, Job
from tests.model_executor.engine import draw, load
from tests.model_executor.executor_process import DEADLINE_S, executor_process

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(5).integers(1, VOCAB, 40).tolist()
CLASSES = {
    "qwen2": ["grouped-full-rope10000+gated"] * 3 + ["grouped-sliding5-rope10000+gated"] * 3,
    "qwen3": ["grouped-full-rope10000+gated", "grouped-sliding6-rope10000+gated"] * 3,
    "gemma2": ["grouped-sliding5-rope10000+gated", "grouped-full-rope10000+gated"] * 3,
    "gemma3_text": [
        *["grouped-sliding5-rope100+gated"] * 2,
        "grouped-full-rope5000-linear4+gated",
        *["grouped-sliding5-rope100+gated"] * 2,
        "grouped-full-rope5000-linear4+gated",
    ],
}


@pytest.fixture(scope="module", params=FAMILIES)
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(model_type: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp(model_type) / "model", model_type, shards=3)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_logits_whole_and_in_chunks(folder: Path, reference: Reference) -> None:
    expected = reference.logits(PROMPT)
    assert expected.std() > 0.3
    loaded = load(folder)
    for chunk in (None, 1, 4, 7):
        assert np.abs(loaded.logits(PROMPT, chunk=chunk) - expected).max() <= TOLERANCE


def test_blocks_have_the_classes_of_their_sources(folder: Path, model_type: str) -> None:
    loaded = load(folder, KEPT[model_type])
    assert [layer.class_name for layer in loaded.spec.layers] == CLASSES[model_type]
    assert list(loaded.plan.classes) == [CLASSES[model_type][source] for source in KEPT[model_type]]
    assert len(loaded.model.rotaries) == len({name.split("rope")[1] for name in loaded.plan.classes})


def test_choices_of_blocks_keep_window_and_rotation(folder: Path, model_type: str) -> None:
    reference = Reference(folder)
    whole = reference.logits(PROMPT)
    keep_layers(reference.model, KEPT[model_type])
    expected = reference.logits(PROMPT)
    assert np.abs(expected - whole).max() > 0.1
    loaded = load(folder, KEPT[model_type])
    for chunk in (None, 7):
        assert np.abs(loaded.logits(PROMPT, chunk=chunk) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("chosen", [False, True], ids=["all", "chosen"])
def test_parameters_are_those_of_the_model(folder: Path, model_type: str, chosen: bool) -> None:
    loaded = load(folder, KEPT[model_type] if chosen else None)
    names = family(loaded.spec.architecture).names
    plan = plan_layers(loaded.spec, loaded.plan.sources)
    table = (*outer_parameters(loaded.spec, names), *block_parameters(loaded.spec, plan, names))
    built = {name: tuple(parameter.shape) for name, parameter in loaded.model.named_parameters()}
    assert {parameter.name: parameter.shape for parameter in table} == built


def test_dummy_weights_stay_finite(folder: Path) -> None:
    scores = draw(folder, dtype=torch.bfloat16).logits(PROMPT)
    assert np.isfinite(scores).all()
    assert scores.std() > 0.05


# What the rest of the file says of a family is the same in this process; these two differ most.
SERVED = [pytest.param(name, marks=() if name in ("qwen2", "gemma3_text") else pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("model_type", SERVED, indirect=True, scope="module")
def test_greedy_tokens_over_the_wire(folder: Path, reference: Reference, tmp_path: Path) -> None:
    """A real executor, two plans ahead, prompts in chunks, prefill and decode mixed."""
    continuations = clear_continuations(reference, 5, 32)
    config = EngineConfig(
        model=ModelOptions(model=str(folder), max_model_len=100),
        cache=CacheOptions(block_size=4, num_kv_blocks=200),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=128),
        executor=ExecutorOptions(device="cpu", cpu_threads=1),
    )
    with executor_process(tmp_path, config) as (core, child):
        _, ready = core.until(ExecutorReady)
        driver = Driver(
            core.send, lambda: core.until(StepResult)[1], groups=ready.kv_groups, block_size=4, chunk=7, depth=2
        )
        jobs = [Job(list(item.prompt), 32, arrives=1 + 2 * index) for index, item in enumerate(continuations)]
        driver.run(jobs)
        core.send(Shutdown())
        assert child.wait(DEADLINE_S) == 0
    assert [job.output for job in jobs] == [list(item.token_ids) for item in continuations]


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
