"""Benchmarks that start their own server: all of its processes, but an executor without a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.record import read_record
from bench.startup import drop_from_page_cache
from bench.throughput import is_http
from model_executor.weights.page_cache import resident_share

SIZES = ["--random-input-len", "12", "--random-output-len", "16", "--vocab", "126"]


def results(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """Run a benchmark that must succeed."""
    status = main([*words, "--json"])
    told = capsys.readouterr()
    assert status == 0, told.err
    return [json.loads(line) for line in told.out.splitlines()]


def test_throughput(modelless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    words = ["--serve", str(modelless), "--num-prompts", "1", "4", "--repeats", "2", "--result-file", str(out)]
    one, four = results(capsys, "throughput", *SIZES, *words)
    assert [found["num_prompts"] for found in (one, four)] == [1, 4]
    for found in (one, four):
        assert found["low"] <= found["output_throughput"] <= found["high"]
        assert found["total_output_tokens"] == found["num_prompts"] * 16
    record = read_record(out)
    assert [len(loads) for loads in record.raw] == [2, 2]
    assert record.kernels[0]["chosen"] == "fake"


def test_throughput_tells_what_http_leaves(modelless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    words = ["--serve", str(modelless), "--num-prompts", "4", "--repeats", "3", "--http", "--result-file", str(out)]
    (found,) = results(capsys, "throughput", *SIZES, *words)
    assert 0 < found["http_share_low"] <= found["http_share"] <= found["http_share_high"]
    (loads,) = read_record(out).raw
    assert len(loads) == 6
    assert all(load["output_lens"] == [16] * 4 for load in loads)


def test_loads_through_http_are_as_often_first_as_second() -> None:
    order = [is_http(index, sides=2) for index in range(8)]
    assert order == [False, True, True, False] * 2
    assert not any(is_http(index, sides=1) for index in range(8))


def test_a_load_on_an_own_server_knows_its_tokenizer(modelless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--serve", str(modelless), "--endpoint", "/v1/chat/completions", "--num-prompts", "3"]
    (found,) = results(capsys, "serve", *SIZES, *words)
    assert (found["completed"], found["total_output_tokens"], found["model_id"]) == (3, 48, "model")
    assert "p99_send_delay_ms" not in found


def test_latency_tells_steps_and_gaps(modelless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--serve", str(modelless), "--batch-size", "3", "--iterations", "2"]
    (found,) = results(capsys, "latency", *SIZES, *words)
    assert (found["batch_size"], len(found["latencies"])) == (3, 2)
    # The executor takes 2 ms a step.
    assert found["median_step_ms"] >= 2.0
    assert found["p10_latency"] <= found["avg_latency"] <= found["p99_latency"]
    assert found["steps_seen"] > 10
    assert found["gap_share"] > 0


def test_startup_tells_seconds_and_memory(modelless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold, warm = results(capsys, "startup", "--serve", str(modelless), "--repeats", "1", "--load", "2")
    assert [found["start"] for found in (cold, warm)] == ["cold", "warm"]
    for found in (cold, warm):
        assert 0 < found["low"] == found["ready_s"] == found["high"]
        parts = [found[f"{role}_mib"] for role in ("frontend", "core", "executor")]
        assert min(parts) > 1
        assert found["total_mib"] == pytest.approx(sum(parts), rel=0.05)
        assert found["phases"]["checkpoint_io"] >= 0


def test_files_leave_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2**20))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    drop_from_page_cache(tmp_path)
    share = resident_share({path: [(0, 2**20)]})
    if share is None:
        pytest.skip("this system does not tell what it keeps")
    assert share < 1.0


def test_ablation_compares_sets_of_options(modelless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    words = ["--serve", str(modelless), "--sets", "default", "--set", "own", "--max-num-seqs 1"]
    load = ["--num-prompts", "4", "--max-concurrency", "2", "--repeats", "1", "--kv-memory-mib", "8"]
    found = results(capsys, "ablate", *SIZES, *words, *load, "--result-file", str(out))
    assert [one["set"] for one in found] == ["default", "own"]
    assert found[0]["plain"]["ratio"] == found[0]["shared"]["ratio"] == 1.0
    assert found[1]["flags"] == "--max-num-seqs 1"
    assert found[1]["plain"]["ratio"] < 1.0
    record = read_record(out)
    assert {name: len(repeats) for name, repeats in record.raw[0].items()} == {"default": 1, "own": 1}


def test_cost_is_of_frontend_and_core(modelless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--serve", str(modelless), "--streams", "2", "--step-ms", "2"]
    (found,) = results(capsys, "cost", *SIZES, *words)
    assert found["streams"] == 2
    parts = found["frontend_cpu_us_per_token"] + found["core_cpu_us_per_token"]
    assert found["cpu_us_per_token"] == pytest.approx(parts)
    assert found["core_cpu_us_per_token"] > 1
    assert found["max_ttft_ms"] >= found["median_ttft_ms"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["throughput", "--repeats", "0"], "--repeats"),
        (["latency", "--batch-size", "0"], "--batch-size"),
        (["startup", "--repeats", "0"], "--repeats"),
        (["ablate", "--sets", "nothing"], "--sets: nothing; known: default"),
        (["cost", "--streams", "0"], "--step-ms, --streams"),
        (["throughput", "--serve", "'"], "--serve"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    words: list[str], message: str, modelless: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert modelless.is_dir()
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
