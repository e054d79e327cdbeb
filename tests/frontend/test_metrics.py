"""The text that scrapers read."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_core.wire.client import STEP_TIME_BOUNDS, STEP_TOKEN_BOUNDS, RequestTimes, Status
from frontend.metrics import Metrics, RequestClock
from frontend.recoveries import Recoveries


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Samples by name and labels."""
    return {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "model_name")): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_before_the_engine_has_said_anything() -> None:
    found = samples(Metrics("m", lambda: None))
    assert found["tercet_request_success_total", "stop"] == 0
    assert ("tercet_num_requests_running",) not in found


def test_the_engines_report() -> None:
    status = Status(
        seq=1,
        state="ready",
        running=3,
        waiting=2,
        waiting_by_reason={"capacity": 2},
        kv_blocks_total=200,
        kv_blocks_used=50,
        step_time_s=1.5,
        step_tokens=40,
        step_time_buckets=[2, 1] + [0] * (len(STEP_TIME_BOUNDS) - 2) + [4],
        step_token_buckets=[7] + [0] * len(STEP_TOKEN_BOUNDS),
        finished={"stop": 5},
        preemptions=6,
    )
    found = samples(Metrics("m", lambda: status))
    assert found["tercet_engine_step_time_seconds_count",] == 7
    assert found["tercet_engine_step_time_seconds_bucket", "0.0025"] == 3
    assert found["tercet_iteration_tokens_total_count",] == 7
    assert found["tercet_iteration_tokens_total_sum",] == 40
    assert found["tercet_num_requests_running",] == 3
    assert found["tercet_num_requests_waiting_by_reason", "capacity"] == 2
    assert found["tercet_num_requests_waiting_by_reason", "deferred"] == 0
    assert found["tercet_kv_cache_usage_perc",] == 0.25
    assert found["tercet_num_preemptions_total",] == 6
    assert found["tercet_engine_requests_finished_total", "stop"] == 5


def test_replaced_processes() -> None:
    counts = Recoveries()
    counts.note(Status(0, "ready", executor_pid=7, executor_restarts=2, recovered=5, recovery_s=0.5))
    counts.engine_replaced(3.0)
    found = samples(Metrics("m", lambda: None, recoveries=lambda: counts))
    assert found["tercet_executor_restarts_total",] == 2
    assert found["tercet_engine_restarts_total",] == 1
    assert found["tercet_requests_recovered_total",] == 5
    assert found["tercet_recovery_seconds", "executor"] == 0.5
    assert found["tercet_recovery_seconds", "engine"] == 3.0
    assert ("tercet_engine_restarts_total",) not in samples(Metrics("m", lambda: None))


def test_a_report_with_other_buckets_gives_an_empty_histogram() -> None:
    found = samples(Metrics("m", lambda: Status(seq=1, state="ready", step_time_buckets=[1, 2])))
    assert found["tercet_engine_step_time_seconds_count",] == 0


def test_the_clock_of_a_request() -> None:
    times = iter([10.0, 10.5, 11.5, 13.0])
    metrics = Metrics("m", lambda: None, clock=lambda: next(times))
    clock = RequestClock(metrics)
    clock.tokens(0, 0)
    clock.tokens(0, 1)
    clock.tokens(0, 4)
    metrics.answer_ended(RequestTimes(0.1, 0.4, 1.0, 2), 5)
    assert clock.end("stop") == 3.0
    found = samples(metrics)
    assert clock.first_token_s == 0.5
    assert found["tercet_time_to_first_token_seconds_sum",] == 0.5
    assert found["tercet_inter_token_latency_seconds_count",] == 4
    assert found["tercet_inter_token_latency_seconds_sum",] == 1.0
    assert found["tercet_request_time_per_output_token_seconds_sum",] == 0.25
    assert found["tercet_request_inference_time_seconds_sum",] == pytest.approx(1.4)
    assert found["tercet_generation_tokens_total",] == 5
    assert found["tercet_request_success_total", "stop"] == 1
