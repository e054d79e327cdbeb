"""Figures of a load, worked out by hand."""

from __future__ import annotations

import pytest

from bench.answer import Answer
from bench.errors import UsageError
from bench.load import Load
from bench.result import (
    DEFINITIONS,
    METRICS,
    Wanted,
    figures,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    raw,
)

# Two whole answers side by side, and one that failed.
LOAD = Load(
    answers=[
        Answer(due=10.0, sent=10.0, ended=12.0, arrivals=[10.5, 11.0, 12.0], input_tokens=4, output_tokens=3),
        Answer(due=10.0, sent=11.0, ended=13.0, arrivals=[11.25, 13.0], input_tokens=6, output_tokens=2),
        Answer(due=10.0, sent=12.0, ended=12.5, arrivals=[12.25], output_tokens=9, error="it broke"),
    ],
    seconds=4.0,
    cpu_s=0.005,
)


def test_counts_and_rates_leave_failed_requests_out() -> None:
    found = figures(LOAD, Wanted())
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (10, 5)
    assert (found["request_throughput"], found["output_throughput"]) == (0.5, 1.25)
    assert (found["total_token_throughput"], found["client_cpu_us_per_token"]) == (3.75, 1000.0)
    assert (found["max_concurrent_requests"], found["max_output_tokens_per_s"]) == (2, 2)
    assert found["p99_send_delay_ms"] == pytest.approx(1980.0)


def test_latencies_are_in_milliseconds_under_vllms_names() -> None:
    found = figures(LOAD, Wanted(percentiles=(0.0, 99.0)))
    assert (found["mean_ttft_ms"], found["median_ttft_ms"], found["std_ttft_ms"]) == (375.0, 375.0, 125.0)
    assert (found["mean_tpot_ms"], found["mean_e2el_ms"]) == (1250.0, 2000.0)
    assert (found["median_itl_ms"], found["p0_itl_ms"]) == (1000.0, 500.0)
    assert found["p99_ttft_ms"] == pytest.approx(497.5)


def test_only_what_is_wanted_is_there() -> None:
    found = figures(LOAD, Wanted(metrics=("itl",), percentiles=(99.9,)))
    assert "p99.9_itl_ms" in found
    assert not [name for name in found if "ttft" in name or "e2el" in name or name == "request_goodput"]


def test_goodput_counts_requests_that_met_every_limit() -> None:
    assert figures(LOAD, Wanted(goodput={"ttft": 300.0}))["request_goodput"] == 0.25
    assert figures(LOAD, Wanted(goodput={"ttft": 300.0, "tpot": 800.0}))["request_goodput"] == 0.0
    assert figures(LOAD, Wanted(goodput={"e2el": 2000.0}))["request_goodput"] == 0.5


def test_samples_are_kept_in_seconds() -> None:
    kept = raw(LOAD)
    assert kept["start_times"] == [0.0, 1.0, 2.0]
    assert kept["itls"] == [[0.5, 1.0], [1.75], []]
    assert kept["errors"] == ["", "", "it broke"]


def test_a_load_without_answers_has_figures() -> None:
    found = figures(Load([Answer(error="no")], 1.0, 0.0), Wanted())
    assert (found["completed"], found["failed"], found["p99_itl_ms"]) == (0, 1, 0.0)


def test_every_figure_is_defined() -> None:
    wanted = Wanted(goodput={"ttft": 1.0})
    plain = {name for name in figures(LOAD, wanted) if not any(f"_{metric}_ms" in name for metric in METRICS)}
    assert plain - {"failed"} <= set(DEFINITIONS)
    assert set(METRICS) <= set(DEFINITIONS)


def test_flags_are_read() -> None:
    assert parse_metrics("ttft, itl") == ("ttft", "itl")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    assert parse_goodput(["ttft:200", "e2el:4e3"]) == {"ttft": 200.0, "e2el": 4000.0}


@pytest.mark.parametrize("text", ["ttft:", "ttft", "itl:3", "ttft:-1", "ttft:inf", "x:1"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--goodput"):
        parse_goodput([text])


def test_unknown_metrics_and_percentiles_are_refused() -> None:
    with pytest.raises(UsageError, match="--percentile-metrics: x"):
        parse_metrics("ttft,x")
    for text in ("101", "-1", "a"):
        with pytest.raises(UsageError, match="--metric-percentiles"):
            parse_percentiles(text)
