"""Health, models, metrics, version, invariants, and paths that are none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_core.wire.logs import LineFormatter
from frontend.config import HttpOptions
from tests.fakes.live import LiveServer, eventually, strict


def test_models(live: LiveServer) -> None:
    listed = live.http.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["chain", "alias"]
    assert listed["data"][0]["max_model_len"] == 1024
    assert live.http.get("/v1/models/alias").json()["id"] == "alias"
    assert live.http.get("/v1/models/other").status_code == 404


def test_version(live: LiveServer) -> None:
    assert live.http.get("/version").json() == {"version": "1.2.3"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/debug/invariants", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "/health/", 404),
        ("HEAD", "/health", 200),
    ],
)
def test_paths_and_methods(live: LiveServer, method: str, path: str, status: int) -> None:
    answer = live.http.request(method, path)
    assert answer.status_code == status
    if status != 200:
        assert set(strict(answer.content)["error"]) == {"message", "type", "param", "code"}


def test_states_of_the_engine(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ready=False) as live:
        assert live.http.get("/live").status_code == 200
        loading = live.http.get("/health")
        assert (loading.status_code, loading.json()["status"]) == (503, "loading")
        refused = live.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert strict(refused.content)["error"]["code"] == "not_ready"
        live.call(live.core.become_ready)
        eventually(lambda: live.http.get("/ready").status_code == 200, "ready")
        live.core.state = "stalled"
        eventually(lambda: live.http.get("/health").json()["status"] == "stalled", "stalled")
        assert live.http.get("/health").status_code == 503
        live.core.state = "ready"
        eventually(lambda: live.http.get("/health").status_code == 200, "ready again")
        live.service.draining = True
        for path in ("/ready", "/health"):
            assert live.http.get(path).json()["status"] == "draining"
        assert live.post("/v1/completions", {"prompt": "a"}).status_code == 503


def test_invariants_only_where_asked_for(tmp_path: Path) -> None:
    with LiveServer(tmp_path, options=HttpOptions(debug_endpoints=True)) as live:
        assert live.http.get("/debug/invariants").json() == {
            "free": 1000,
            "cached": 0,
            "owned": 24,
            "total": 1024,
            "violations": [],
        }


def test_counters_add_up(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live:
        usages = [live.complete("a" * (1 + number), max_tokens=3 + number)["usage"] for number in range(6)]
        usages.append(live.complete("C", max_tokens=9, n=2, stop="f")["usage"])
        for _ in range(3):
            live.post("/v1/completions", {"prompt": "a", "temperature": -1})
        assert live.metric("tercet_request_success_total", finished_reason="length") == 6
        assert live.metric("tercet_request_success_total", finished_reason="stop") == 1
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_n"):
            assert live.metric(f"tercet_{name}_count") == 7, name
        assert live.metric("tercet_request_generation_tokens_count") == 8
        assert live.metric("tercet_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
        generated = sum(usage["completion_tokens"] for usage in usages)
        assert live.metric("tercet_generation_tokens_total") == generated
        eventually(lambda: live.metric("tercet_engine_generation_tokens_total") >= generated, "the engine's own count")
        families = list(text_string_to_metric_families(live.http.get("/metrics").text))
        names = {family.name for family in families}
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"):
            assert f"tercet_{name}" in names
        labels = {key for family in families for sample in family.samples for key in sample.labels}
        assert labels <= {"model_name", "finished_reason", "reason", "le"}


def test_the_log_of_requests_holds_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = HttpOptions(enable_log_requests=True)
    with LiveServer(tmp_path, options=options) as live, caplog.at_level(logging.INFO):
        live.complete("abcd", max_tokens=3, stop="never", user="someone")
    (record,) = [record for record in caplog.records if record.getMessage() == "request ended"]
    line = LineFormatter("frontend", "text", values=False).format(record)
    for fact in ("prompt_tokens=4", "completion_tokens=3", "status=200", "answer=cmpl-", "finish=length", "seconds="):
        assert fact in line
    for word in ("abcd", "efg", "never", "someone"):
        assert word not in line
