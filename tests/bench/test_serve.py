"""`tercet bench serve` on a server over a fake core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.record import read_record
from tests.fakes.live import LiveServer

SIZES = ["--random-input-len", "12", "--random-output-len", "9", "--vocab", "126"]


def serve(live: LiveServer, *words: str) -> int:
    """Run the benchmark."""
    return main(["serve", "--base-url", live.url, *SIZES, *words])


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The results that were printed."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_closed_loop_at_several_sizes(live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    words = ["--max-concurrency", "1", "4", "--num-prompts", "6", "--warmup", "2", "--json", "--result-file", str(out)]
    assert serve(live, *words) == 0
    one, four = lines(capsys)
    assert [found["max_concurrency"] for found in (one, four)] == [1, 4]
    for found in (one, four):
        assert (found["completed"], found["failed"]) == (6, 0)
        assert (found["total_input_tokens"], found["total_output_tokens"]) == (6 * 12, 6 * 9)
        assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"]
        assert found["median_ttft_ms"] < found["median_e2el_ms"]
    assert one["max_concurrent_requests"] == 1
    assert 1 < four["max_concurrent_requests"] <= 4
    # Two runs with their warm-ups; no prompt twice.
    prompts = [submit.prompt for submit in live.core.submits]
    assert len(set(prompts)) == len(prompts) == 2 * (6 + 2)
    record = read_record(out)
    assert record.kind == "serve"
    assert record.command[:3] == ["tercet", "bench", "serve"]
    assert [len(raw["ttfts"]) for raw in record.raw] == [6, 6]
    # Tokens that come in one piece have no gap.
    assert all(1 <= len(gaps) <= 8 for raw in record.raw for gaps in raw["itls"])
    assert record.kernels == []


def test_an_open_loop_sends_at_the_rate(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--request-rate",
        "100",
        "--burstiness",
        "1000",
        "--num-prompts",
        "20",
        "--goodput",
        "ttft:60000",
        "e2el:0",
    ]
    assert serve(live, *words, "--json") == 0
    (found,) = lines(capsys)
    assert found["duration"] >= 0.9 * 19 / 100
    assert found["request_goodput"] == 0.0
    assert (found["request_rate"], found["burstiness"]) == (100.0, 1000.0)


def test_chat_with_texts_of_an_exact_length(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--endpoint", "/v1/chat/completions", "--num-prompts", "3", "--json"]
    assert serve(live, *words, "--tokenizer", str(live.model_dir)) == 0
    (found,) = lines(capsys)
    assert (found["completed"], found["backend"], found["total_output_tokens"]) == (3, "openai-chat", 27)
    assert found["total_input_tokens"] > 3 * 12
    assert serve(live, *words) == 2
    assert "need --tokenizer" in capsys.readouterr().err


def test_a_table_is_for_people(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(live, "--num-prompts", "2", "--warmup", "0") == 0
    title, line = capsys.readouterr().out.splitlines()
    assert title.startswith("max_concurrency  completed")
    assert line.split()[1] == "2"


def test_failed_requests_are_counted_and_nothing_but_failures_is_an_error(
    live: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(live, "--model", "other", "--num-prompts", "2") == 4
    error = capsys.readouterr().err
    assert error.startswith("error: http://")
    assert "all requests failed, the first: status 404" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--request-rate", "0"], "--request-rate"),
        (["--extra-body", "["], "--extra-body"),
        (["--goodput", "x:1"], "--goodput"),
        (["--serve", "model"], "--base-url, --serve"),
        (["--random-input-len", "0"], "--random-input-len"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    words: list[str], message: str, live: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(live, *words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--base-url", "http://127.0.0.1:9"]) == 4
    assert "names no model" in capsys.readouterr().err
