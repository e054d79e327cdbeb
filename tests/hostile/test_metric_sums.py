"""Gauges fall back after a mass flight, and counters add up whatever became of the requests."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.live import eventually, strict
from tests.hostile.conftest import STEP_TOKENS, Stack
from tests.hostile.raw import connect, leave, request

ENDLESS = {"ignore_eos": True, "max_tokens": 900, "temperature": 0}
PATH = "/v1/completions"


def test_gauges_fall_after_all_have_left(slow_stack: Stack) -> None:
    stack = slow_stack
    ended = stack.live.metric("tercet_request_success_total", finished_reason="abort")
    connections = [connect(stack.live.url) for _ in range(20)]
    for number, connection in enumerate(connections):
        connection.sendall(request({**ENDLESS, "prompt": [number + 1], "stream": number % 2 == 0}))
    eventually(lambda: stack.status().running + stack.status().waiting == 20, "all are there")
    eventually(lambda: stack.live.metric("tercet_kv_cache_usage_perc") > 0, "the gauge rises")
    for connection in connections:
        leave(connection, "rst")
    # Nothing more is sent but the reading of the gauges.
    stack.settle(5.0)
    assert stack.live.metric("tercet_request_success_total", finished_reason="abort") == ended + 20


class Sums:
    """What /metrics says, against what it said before."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._before = self._read()

    def _read(self) -> dict[tuple[str, str], float]:
        families = text_string_to_metric_families(self._stack.live.http.get("/metrics").text)
        return {
            (sample.name, sample.labels.get("finished_reason", sample.labels.get("reason", ""))): sample.value
            for family in families
            for sample in family.samples
            if "le" not in sample.labels
        }

    def grown(self, name: str, reason: str = "") -> float:
        """By how much a counter has grown."""
        return self._read().get((name, reason), 0.0) - self._before.get((name, reason), 0.0)

    def fallen(self) -> list[tuple[str, str]]:
        """Counters that are smaller than before."""
        now = self._read()
        counters = [key for key in self._before if key[0].endswith(("_total", "_count", "_sum"))]
        return [key for key in counters if now.get(key, 0.0) < self._before[key]]


def finish(stack: Stack, number: int) -> dict[str, int]:
    """One request that ends by itself; gives its usage."""
    body: dict[str, Any] = {
        "prompt": [number + 1, 5],
        "max_tokens": 1 + number % 7,
        "ignore_eos": True,
        "n": 1 + number % 2,
    }
    if number % 3:
        return dict(strict(stack.live.post(PATH, body).content)["usage"])
    events = stack.live.events(PATH, {**body, "stream_options": {"include_usage": True}})
    return dict(events[-1]["usage"])


def test_counters_add_up(slow_stack: Stack) -> None:
    """50 finished, 10 refused, 10 that left before their first token, 10 after it."""
    stack = slow_stack
    stack.settle()
    sums = Sums(stack)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        usages = list(pool.map(lambda number: finish(stack, number), range(50)))
    for number in range(10):
        assert stack.live.post(PATH, {"prompt": [number], "temperature": -1}).status_code == 400
    for number in range(10):
        # A prefill of many steps, with no prefix that is cached already.
        connection = connect(stack.live.url)
        body = {**ENDLESS, "prompt": [number + 20] * (STEP_TOKENS * 20), "cache_salt": f"sums {number}"}
        connection.sendall(request(body))
        eventually(lambda: stack.live.client.open_generations == 1, "it is open")
        leave(connection, "fin")
        eventually(lambda: stack.live.client.open_generations == 0, "it ended")
    for number in range(10):
        connection = connect(stack.live.url)
        connection.sendall(request({**ENDLESS, "prompt": [number + 40], "stream": True}))
        received = b""
        while b"data: " not in received:
            received += connection.recv(65536)
        leave(connection, "rst")
    stack.settle()
    ends = {
        reason: sums.grown("tercet_request_success_total", reason) for reason in ("stop", "length", "abort", "error")
    }
    assert ends == {"stop": 0, "length": 50, "abort": 20, "error": 0}
    assert sums.grown("tercet_time_to_first_token_seconds_count") == 60
    # Aborted requests have a latency too: each that was queued is counted once.
    assert sums.grown("tercet_e2e_request_latency_seconds_count") == 70
    prompt, completion = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    # Of aborted requests, prompts count once a token came, and tokens as they came.
    assert sums.grown("tercet_prompt_tokens_total") == prompt + 10
    generated = sums.grown("tercet_generation_tokens_total")
    assert generated >= completion + 10
    assert sums.grown("tercet_engine_generation_tokens_total") >= generated
    assert sums.fallen() == []
