"""A line of profile for each step, when a file was asked for and not otherwise."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from engine_core.wire.codec import pack_ids
from engine_core.wire.config import CacheOptions, EngineConfig, ExecutorOptions, ModelOptions, SchedulerOptions
from engine_core.wire.evidence import OUTSIDE, StepProfile
from engine_core.wire.executor import Row, SlotFill, StepPlan
from engine_core.wire.sampling import SamplingParams
from model_executor.errors import DeviceUnavailable
from model_executor.models.reader import read_spec
from model_executor.profiler import ProfiledRunner, StepProfiler, kind_of
from model_executor.runner import Runner
from model_executor.startup import Executor, PhaseClock, bring_up
from tests.model_executor.engine import CPU, SMALL, silent, write_small

GREEDY = SamplingParams(temperature=0.0)


def start(folder: Path, profile: Path | None) -> Executor:
    config = EngineConfig(
        model=ModelOptions(model=str(folder), max_model_len=32),
        cache=CacheOptions(block_size=4, num_kv_blocks=32),
        scheduler=SchedulerOptions(max_num_seqs=2),
        executor=ExecutorOptions(device="cpu", cpu_threads=1, profile_file=None if profile is None else str(profile)),
    )
    return bring_up(config, read_spec(folder, config.model), 1, PhaseClock(0.0, silent), silent)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("small") / "model")


def plans() -> list[StepPlan]:
    """A prompt in two chunks, a decode step, a step of both kinds."""
    first = SlotFill(0, pack_ids(range(6)), 6, GREEDY, 0, [[0, 1, 2]])
    second = SlotFill(1, pack_ids(range(3)), 3, GREEDY, 0, [[3, 4]])
    return [
        StepPlan(1, 1, [first], [Row(0, 0, 4, [], False)]),
        StepPlan(1, 2, [], [Row(0, 4, 2, [], True)]),
        StepPlan(1, 3, [], [Row(0, 6, 1, [], True)]),
        StepPlan(1, 4, [second], [Row(0, 7, 1, [], True), Row(1, 0, 3, [], True)]),
    ]


def test_a_line_for_each_step_and_equal_tokens(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile"
    watched, plain = start(folder, path), start(folder, None)
    assert isinstance(watched.runner, ProfiledRunner)
    assert isinstance(plain.runner, Runner)
    for plan in plans():
        assert watched.runner.execute(plan).token_ids == plain.runner.execute(plan).token_ids
    lines = msgspec.json.Decoder(StepProfile).decode_lines(path.read_bytes())
    assert [(line.step, line.kind, line.chunked, line.tokens, line.rows) for line in lines] == [
        (0, "warm_up", False, 0, 0),
        (1, "prefill", True, 4, 1),
        (2, "prefill", True, 2, 1),
        (3, "decode", False, 1, 1),
        (4, "mixed", False, 4, 2),
    ]
    layer_class = watched.plan.classes[0]
    chosen = {choice.operator: choice.chosen for choice in watched.ready.kernels}
    for line in lines:
        runs = {(run.layer_class, run.operator): run for run in line.operators}
        sampled = line.step != 1
        assert ((OUTSIDE, "sampling") in runs) == sampled
        assert ((OUTSIDE, "linear: head") in runs) == sampled
        assert "soft cap of the logits" not in {run.operator for run in line.operators}
        attention = runs[layer_class, "attention"]
        assert attention.kernel == chosen["attention"]
        assert runs[layer_class, "linear: qkv"].kernel == chosen["linear"]
        assert attention.count == SMALL.layers * (4 if line.kind == "warm_up" else 1) // (2 if line.step == 0 else 1)
        assert all(run.host_ns > 0 and run.device_ns == 0 for run in line.operators)
        assert "aten::empty" in {name for run in line.operators for name in run.native}
        assert (line.graphs, line.captured) == (0, False)


def test_kinds() -> None:
    assert kind_of([1, 1]) == "decode"
    assert kind_of([1, 5]) == "mixed"
    assert kind_of([5]) == "prefill"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="profile_file"):
        StepProfiler(tmp_path / "nowhere" / "profile", CPU)


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    path.write_text("old", encoding="utf-8")
    profiler = StepProfiler(path, CPU)
    assert profiler.run(lambda: int(torch.ones(2).sum()), None) == 2
    assert len(path.read_bytes().splitlines()) == 1
