from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from engine_core.wire.codec import pack_ids
from engine_core.wire.config import (
    CacheOptions,
    EngineConfig,
    ExecutorOptions,
    ModelOptions,
    SchedulerOptions,
    TextFacts,
)
from engine_core.wire.executor import KvGroup, Row, SlotFill, StepPlan, StepResult
from engine_core.wire.sampling import SamplingParams
from model_executor.errors import PlanInvalid
from model_executor.models.reader import read_spec
from model_executor.runner import Launched, Runner
from model_executor.startup import Executor, PhaseClock, bring_up
from tests.fixtures.reference import Continuation, Reference, prompts
from tests.model_executor.driver import GREEDY, Driver, Job

BLOCKS, BLOCK_SIZE = 400, 4
VOCAB = 512
SOFT = SamplingParams(temperature=0.8, top_p=0.95, logprobs=3)


def bring_up_quietly(
    folder: Path,
    *,
    dtype: Literal["auto", "bfloat16", "float16"] = "auto",
    known: int = VOCAB,
    buckets: tuple[int, ...] = (),
    eager: bool = False,
    quantization: Literal["none", "int8"] = "none",
    block_size: int = BLOCK_SIZE,
    cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
) -> Executor:
    """An executor of a folder, without a process.

    Args:
        folder: of the model.
        dtype: to compute in.
        known: ids the tokenizer knows.
        buckets: of --cuda-graph-sizes.
        eager: of --enforce-eager.
        quantization: of the products.
        block_size: tokens a KV block.
        cache_dtype: of --kv-cache-dtype.
    """
    config = EngineConfig(
        model=ModelOptions(model=str(folder), max_model_len=200, dtype=dtype, quantization=quantization),
        cache=CacheOptions(block_size=block_size, num_kv_blocks=BLOCKS, kv_cache_dtype=cache_dtype),
        scheduler=SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=256),
        executor=ExecutorOptions(
            device="cpu", cpu_threads=torch.get_num_threads(), cuda_graph_sizes=buckets, enforce_eager=eager
        ),
        text=TextFacts(vocab_size=known),
    )
    clock = PhaseClock(time.monotonic(), lambda *_: None)
    return bring_up(config, read_spec(folder, config.model), 1, clock, lambda *_: None)


def runner_of(executor: Executor) -> Runner:
    """Its runner, which no profiler watches."""
    assert isinstance(executor.runner, Runner)
    return executor.runner


@pytest.fixture(scope="module")
def runner(rand_folder: Path) -> Runner:
    return runner_of(bring_up_quietly(rand_folder))


@pytest.fixture(scope="module")
def reference(rand_folder: Path) -> Reference:
    return Reference(rand_folder)


@pytest.fixture(scope="module")
def continuations(reference: Reference) -> list[Continuation]:
    """Twelve greedy continuations of 12 tokens without near ties; lengths include block borders and 1."""
    fixed = [[3], list(range(4)), list(range(20, 28)), list(range(5))]
    made = (reference.greedy(prompt, 12) for prompt in [*fixed, *prompts(30, vocab=VOCAB, seed=2)])
    clear = [continuation for continuation in made if continuation.clear()]
    assert len(clear) >= 12
    return clear[:12]


def run(runner: Runner, jobs: Sequence[Job], *, chunk: int = 10**6, depth: int = 1, seed: int = 0) -> list[list[int]]:
    """Run the jobs; with depth 2 a step is launched before the one before it is collected."""
    launched: deque[Launched] = deque()
    driver = Driver(
        lambda plan: launched.append(runner.launch(plan)),
        lambda: runner.collect(launched.popleft()),
        groups=[KvGroup(None, BLOCKS)],
        block_size=BLOCK_SIZE,
        chunk=chunk,
        depth=depth,
        seed=seed,
    )
    driver.run(jobs)
    return [job.output for job in jobs]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 10**6])
def test_greedy_tokens_are_those_of_the_reference(
    runner: Runner, continuations: list[Continuation], chunk: int, depth: int
) -> None:
    """Twelve requests that arrive one after the other, so that prefill and decode mix, in every chunking."""
    jobs = [Job(list(item.prompt), 12, arrives=1 + index // 2) for index, item in enumerate(continuations)]
    assert run(runner, jobs, chunk=chunk, depth=depth, seed=chunk) == [list(item.token_ids) for item in continuations]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_on_static_buffers_give_the_same_tokens(
    rand_folder: Path, continuations: list[Continuation], depth: int
) -> None:
    """Rows come and go, so that every bucket is filled, and left half empty."""
    executor = bring_up_quietly(rand_folder, buckets=(1, 3, 8))
    jobs = [Job(list(item.prompt), 12, arrives=1 + 2 * index) for index, item in enumerate(continuations)]
    assert run(runner_of(executor), jobs, depth=depth) == [list(item.token_ids) for item in continuations]
    explained = executor.runner.explain()
    assert explained[0] == "decode steps of up to 8 rows: replayed on static buffers, padded to [1, 3, 8]"
    assert {line.partition(" steps ")[2] for line in explained[1:]} >= {
        "of 1 rows replayed",
        "of 3 rows replayed",
        "of 8 rows replayed",
        "run as they are: rows of several tokens",
    }


def test_a_result_tells_what_its_step_was_padded_to(rand_folder: Path) -> None:
    runner = runner_of(bring_up_quietly(rand_folder, buckets=(4,)))
    fill = SlotFill(0, pack_ids([1, 2, 3]), 3, GREEDY, 0, [[0]])
    buckets = [
        runner.execute(StepPlan(1, 1, [fill], [Row(0, 0, 2, [], False)])).bucket,
        runner.execute(StepPlan(1, 2, [], [Row(0, 2, 1, [], True)])).bucket,
        runner.execute(StepPlan(1, 3, [], [Row(0, 3, 1, [], True)])).bucket,
    ]
    assert buckets == [0, 4, 4]


def test_each_request_alone(runner: Runner, continuations: list[Continuation]) -> None:
    for item in continuations:
        assert run(runner, [Job(list(item.prompt), 12)]) == [list(item.token_ids)]


def test_logprobs_are_those_of_the_reference(runner: Runner, reference: Reference) -> None:
    """Teacher-forced: every position of a text is the end of a prompt, computed in one batch."""
    text = prompts(1, vocab=VOCAB, seed=9, shortest=14, longest=14)[0]
    jobs = [Job(text[:length], 1, SamplingParams(temperature=0.0, logprobs=20)) for length in range(1, 15)]
    run(runner, jobs, chunk=5)
    logits = torch.from_numpy(reference.logits(text))
    expected = logits.log_softmax(-1)
    for position, job in enumerate(jobs):
        entry = job.logprobs[0]
        assert entry.logprob == entry.top_logprobs[0]
        difference = np.array(entry.top_logprobs) - expected[position, entry.top_ids].numpy()
        assert np.abs(difference).max() <= 1e-3


@pytest.fixture(scope="module")
def soft_jobs() -> Callable[[], list[Job]]:
    def make() -> list[Job]:
        texts = prompts(8, vocab=VOCAB, seed=4, longest=30)
        return [Job(text, 10, SOFT, seed=100 + index) for index, text in enumerate(texts)]

    return make


def test_seeded_draws_do_not_depend_on_the_batch(runner: Runner, soft_jobs: Callable[[], list[Job]]) -> None:
    together = run(runner, soft_jobs())
    assert run(runner, list(reversed(soft_jobs())), chunk=4, depth=2) == together[::-1]
    for index, job in enumerate(soft_jobs()):
        assert run(runner, [job]) == [together[index]]
    assert len({tuple(output) for output in together}) == len(together)


def test_seeded_draws_go_on_after_a_preemption(runner: Runner, soft_jobs: Callable[[], list[Job]]) -> None:
    """A request that comes back as prompt and output so far goes on as if it had never left."""
    together = run(runner, soft_jobs())
    for index in (0, 3):
        job = soft_jobs()[index]
        resumed = replace(job, prompt=job.prompt + together[index][:6], count=4)
        assert run(runner, [resumed], chunk=5) == [together[index][6:]]


def test_what_other_sequences_left_behind_does_not_matter(rand_folder: Path, continuations: list[Continuation]) -> None:
    runner = runner_of(bring_up_quietly(rand_folder))
    for layer in runner.cache.layers:
        layer.key.fill_(1e4)
        layer.value.fill_(-1e4)
    jobs = [Job(list(item.prompt), 12) for item in continuations]
    assert run(runner, jobs, chunk=6) == [list(item.token_ids) for item in continuations]


def test_min_tokens_holds_back_the_end(rand_folder: Path, continuations: list[Continuation]) -> None:
    """What the reference would say first is a stop token: it may not come before min_tokens, and may then."""
    item = continuations[0]
    runner = runner_of(bring_up_quietly(rand_folder))
    stop = item.token_ids[0]
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(stop,))
    free, held = run(runner, [Job(list(item.prompt), 12), Job(list(item.prompt), 12, params)])
    assert free[0] == stop
    assert stop not in held[:3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_the_reference(
    rand_folder: Path, reference: Reference, dtype: Literal["bfloat16", "float16"]
) -> None:
    runner = runner_of(bring_up_quietly(rand_folder, dtype=dtype))
    text = prompts(1, vocab=VOCAB, seed=11, shortest=20, longest=20)[0]
    jobs = [Job(text[:length], 1, SamplingParams(temperature=0.0, logprobs=5)) for length in (1, 7, 20)]
    run(runner, jobs)
    logits = torch.from_numpy(reference.logits(text)).log_softmax(-1)
    limit = 0.25 if dtype == "bfloat16" else 0.04
    for job in jobs:
        entry = job.logprobs[0]
        expected = logits[len(job.prompt) - 1, entry.top_ids].numpy()
        assert np.abs(np.array(entry.top_logprobs) - expected).max() < limit


def test_a_step_without_a_sample_gives_no_tokens(runner: Runner) -> None:
    fill = SlotFill(0, pack_ids([1, 2, 3]), 3, GREEDY, 0, [[0]])
    result = runner.execute(StepPlan(1, 1, [fill], [Row(0, 0, 2, [], False)]))
    assert result == StepResult(1, 1, [], None, result.started_ns, result.ended_ns)


def test_more_tokens_than_a_step_may_hold(runner: Runner) -> None:
    fills = [
        SlotFill(slot, pack_ids([1] * 150), 150, GREEDY, 0, [list(range(slot * 38, slot * 38 + 38))]) for slot in (0, 1)
    ]
    rows = [Row(slot, 0, 150, [], True) for slot in (0, 1)]
    with pytest.raises(PlanInvalid, match="tokens of a step: 300: allowed is at most 256"):
        runner.execute(StepPlan(1, 1, fills, rows))


def test_what_is_ready_is_told(rand_folder: Path) -> None:
    ready = bring_up_quietly(rand_folder).ready
    assert (ready.epoch, ready.max_model_len, ready.vocab_size, ready.dtype) == (1, 200, VOCAB, "float32")
    assert (ready.num_kv_blocks, ready.max_num_batched_tokens, ready.device) == (BLOCKS, 256, "cpu")
    assert {choice.operator for choice in ready.kernels} - {"kv_append"} == {"attention", "heads", "linear", "norm"}
    assert ready.graphs is not None
    assert ready.graphs.chosen == "as_it_is"
    assert set(ready.startup_s) == {"start", "plan", "build", "load", "pack", "kv_cache", "warm_up", "warm_run"}
    # 4 layers of 2 heads of 32, keys and values, float32; the scratch block counts.
    assert ready.memory["kv_cache"] == (BLOCKS + 1) * BLOCK_SIZE * 4 * 2 * 32 * 2 * 4
    assert ready.memory["buffers"] == 16 * 201 * 4
    assert ready.memory["weights"] >= ready.load.bytes_materialized > 0


def test_ids_the_tokenizer_lacks_are_never_sampled(rand_folder: Path) -> None:
    executor = bring_up_quietly(rand_folder, known=100)
    assert executor.ready.vocab_size == VOCAB
    greedy, drawn = run(runner_of(executor), [Job([5, 400, 6], 20), Job([5, 400, 6], 20, SOFT, seed=3)])
    assert max(greedy + drawn) < 100


@pytest.mark.parametrize(
    ("quantization", "asked", "kept"),
    [
        ("none", "auto", "float32"),
        ("none", "float16", "float16"),
        ("none", "bfloat16", "bfloat16"),
        ("int8", "auto", "float16"),
        ("int8", "float32", "float32"),
    ],
)
def test_keys_and_values_are_kept_in_the_dtype_asked_for(
    rand_folder: Path,
    quantization: Literal["none", "int8"],
    asked: Literal["auto", "float32", "float16", "bfloat16"],
    kept: str,
) -> None:
    executor = bring_up_quietly(rand_folder, quantization=quantization, cache_dtype=asked)
    plain = bring_up_quietly(rand_folder)
    assert (executor.ready.kv_cache_dtype, executor.ready.dtype) == (kept, "float32")
    share = 1 if kept == "float32" else 2
    assert share * executor.ready.memory["kv_cache"] == plain.ready.memory["kv_cache"]
    assert all(f"torch.{kept}" == str(layer.key.dtype) == str(layer.value.dtype) for layer in executor.cache.layers)


def test_tokens_with_a_narrow_cache_are_nearly_those_of_the_reference(
    rand_folder: Path, continuations: list[Continuation]
) -> None:
    jobs = [Job(list(item.prompt), 12, arrives=1 + index // 2) for index, item in enumerate(continuations)]
    given = run(runner_of(bring_up_quietly(rand_folder, cache_dtype="float16")), jobs, chunk=7)
    equal = sum(ours == list(item.token_ids) for ours, item in zip(given, continuations, strict=True))
    assert equal >= len(continuations) - 1
