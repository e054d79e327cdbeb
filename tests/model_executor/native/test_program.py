"""The program of a model gives the bits of its modules, and a model that has none says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
from torch import Tensor

from engine_core.wire.codec import pack_ids
from engine_core.wire.executor import Row, SlotFill, StepPlan
from model_executor import runner as runner_module
from model_executor.device import DTYPES
from model_executor.layers.linear import Linear
from model_executor.native.linear import PackedProduct
from model_executor.native.program import why_not
from model_executor.sampler import Logprobs, SampleRows, sample
from model_executor.startup import Executor
from tests.fixtures.expert_families import write_experts
from tests.fixtures.families import VOCAB, write_family
from tests.fixtures.llama import Shape
from tests.fixtures.reference import prompts
from tests.model_executor.driver import GREEDY, Driver, Job
from tests.model_executor.engine import write_small
from tests.model_executor.native.builds import builds
from tests.model_executor.test_runner import bring_up_quietly, runner_of

pytestmark = pytest.mark.skipif(not builds(), reason="the package was built without a C compiler")

Quantization: TypeAlias = Literal["none", "int8"]
CacheDtype: TypeAlias = Literal["auto", "float32", "float16", "bfloat16"]
Model: TypeAlias = tuple[Path, Quantization, CacheDtype]
SIZES = {"hidden_size": 64, "max_position_embeddings": 256}
SHAPE = Shape(hidden=64, layers=3, heads=4, kv_heads=2, intermediate=64, vocab=VOCAB, max_position=256)
BIASED = Shape(64, 3, 4, 2, 32, 80, VOCAB, 256, tied=True, attention_bias=True, mlp_bias=True)
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
# Native attention takes multiples of 16.
BLOCK_SIZE = 16
# Every bucket is filled and left half empty.
BUCKETS = (1, 3, 8)


def llama(shape: Shape, **config: Any) -> Callable[[Path], Path]:
    """Writes a model of this shape."""
    return lambda folder: write_small(folder, shape, **config)


def family(model_type: str, **config: Any) -> Callable[[Path], Path]:
    """Writes a model of this family."""
    return lambda folder: write_family(folder, model_type, **SIZES, **config)


MODELS: dict[str, tuple[Callable[[Path], Path], Quantization, CacheDtype]] = {
    "llama": (llama(SHAPE), "none", "auto"),
    "llama-bias-tied": (llama(BIASED), "none", "auto"),
    "llama-int8": (llama(SHAPE), "int8", "auto"),
    "mistral": (llama(SHAPE, **MISTRAL), "none", "auto"),
    "qwen2": (family("qwen2"), "none", "float16"),
    "qwen3": (family("qwen3"), "none", "auto"),
    "gemma2": (family("gemma2"), "none", "auto"),
    "gemma3": (family("gemma3_text"), "none", "bfloat16"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    write, quantization, cache_dtype = MODELS[request.param]
    return write(tmp_path_factory.mktemp("program") / "model"), quantization, cache_dtype


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of each step from now on."""
    kept: list[Tensor] = []

    def keeping(logits: Tensor, rows: SampleRows, vocab: int) -> tuple[Tensor, Logprobs | None]:
        kept.append(logits.clone())
        return sample(logits, rows, vocab)

    monkeypatch.setattr(runner_module, "sample", keeping)
    return kept


def bring_up(
    folder: Path,
    quantization: Quantization = "none",
    cache_dtype: CacheDtype = "auto",
    *,
    buckets: tuple[int, ...] = (),
    eager: bool = False,
) -> Executor:
    """An executor whose cache is empty."""
    executor = bring_up_quietly(
        folder,
        buckets=buckets,
        eager=eager,
        quantization=quantization,
        block_size=BLOCK_SIZE,
        cache_dtype=cache_dtype,
    )
    for layer in executor.cache.layers:
        layer.key.zero_()
        layer.value.zero_()
    return executor


def run(executor: Executor) -> list[list[int]]:
    """The tokens of a trace in which chunks of prompts, of which not all end in a sample, meet single tokens."""
    runner = runner_of(executor)
    results = []
    driver = Driver(
        lambda plan: results.append(runner.execute(plan)),
        lambda: results.pop(0),
        groups=executor.ready.kv_groups,
        block_size=BLOCK_SIZE,
        chunk=11,
        seed=1,
    )
    texts = prompts(9, vocab=VOCAB, seed=5, longest=40)
    jobs = [Job(text, 8 + index, arrives=1 + 2 * index) for index, text in enumerate(texts)]
    driver.run(jobs)
    return [job.output for job in jobs]


def blocks(executor: Executor) -> list[Tensor]:
    """All that sequences have written: the scratch block of padding is left out."""
    return [held[:-1] for layer in executor.cache.layers for held in (layer.key, layer.value)]


def graphs_of(executor: Executor) -> tuple[str, list[str]]:
    """What the start reports as chosen, and what speaks against a program."""
    choice = executor.ready.graphs
    assert choice is not None
    (reasons,) = (each.reasons for each in choice.candidates if each.name == "native_program")
    return choice.chosen, reasons


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Equal to the bit."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("buckets", [(), BUCKETS], ids=["as it is", "buckets"])
def test_a_program_gives_the_bits_of_the_modules(model: Model, buckets: tuple[int, ...], seen: list[Tensor]) -> None:
    modules = bring_up(*model, eager=True)
    assert graphs_of(modules) == ("as_it_is", ["--enforce-eager"])
    seen.clear()
    expected, logits = run(modules), list(seen)
    program = bring_up(*model, buckets=buckets)
    assert graphs_of(program) == ("static_buffers" if buckets else "native_program", [])
    seen.clear()
    assert run(program) == expected
    assert len(logits) > 20
    assert same(seen, logits)
    assert same(blocks(program), blocks(modules))


def test_the_program_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """No module computes: what else were compared above?"""
    executor = bring_up(*model)
    monkeypatch.setattr(executor.model, "forward", None)
    assert all(run(executor))


def test_a_hook_sees_every_step(model: Model) -> None:
    expected = run(bring_up(*model))
    executor = bring_up(*model)
    calls: list[int] = []
    hook = executor.model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    assert run(executor) == expected
    hooked = len(calls)
    assert hooked > 20
    hook.remove()
    assert run(executor) == expected
    assert len(calls) == hooked


def test_a_step_in_which_no_row_samples_fills_the_cache(model: Model, seen: list[Tensor]) -> None:
    modules, program = bring_up(*model, eager=True), bring_up(*model)
    seen.clear()
    for executor in (modules, program):
        pool = executor.ready.kv_groups
        fill = SlotFill(0, pack_ids([1, 2, 3, 4, 5]), 5, GREEDY, 0, [[0, 1] for _ in pool])
        none = runner_of(executor).execute(StepPlan(1, 1, [fill], [Row(0, 0, 4, [], False)]))
        assert none.token_ids == []
        assert all(held.any() for held in blocks(executor))
        runner_of(executor).execute(StepPlan(1, 2, [], [Row(0, 4, 1, [], True)]))
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert same(blocks(program), blocks(modules))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_a_model_without_a_program_says_why(name: str, tmp_path: Path) -> None:
    executor = bring_up(write_experts(tmp_path / "model", name, max_position_embeddings=256))
    reason = "a block has another attention or feed-forward part than the library computes"
    assert why_not(executor.model) == reason
    assert graphs_of(executor) == ("as_it_is", [reason])
    assert all(run(executor))


def test_heads_that_the_library_lacks(tmp_path: Path) -> None:
    shape = Shape(hidden=64, layers=2, heads=8, intermediate=48, vocab=VOCAB, max_position=256)
    executor = bring_up_quietly(write_small(tmp_path / "model", shape), block_size=BLOCK_SIZE)
    reason = "the attention of a block is not computed by the library"
    assert why_not(executor.model) == reason
    assert graphs_of(executor) == ("as_it_is", [reason])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_dtype_rounds_weights_and_cache_and_computes_in_float32(
    dtype: Literal["bfloat16", "float16"], tmp_path: Path
) -> None:
    folder = write_small(tmp_path / "model", SHAPE)
    plain, narrow = bring_up_quietly(folder), bring_up_quietly(folder, dtype=dtype, block_size=BLOCK_SIZE)
    assert graphs_of(narrow) == ("native_program", [])
    assert (narrow.ready.dtype, narrow.ready.kv_cache_dtype) == (dtype, dtype)
    exact, rounded = plain.model.embedding.weight, narrow.model.embedding.weight
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, exact.to(DTYPES[dtype]).float())
    assert not torch.equal(rounded, exact)
    products = [each.product for each in narrow.model.modules() if isinstance(each, Linear)]
    assert {product.stored_as for product in products if isinstance(product, PackedProduct)} == {dtype}
    assert all(run(narrow))
