"""What the server counts, as Prometheus text: requests as HTTP clients saw them, and the engine as it reports itself.

A request is one HTTP body that was queued, however many prompts and answers it has. Every queued request is counted
once in `tercet_request_success_total`, under "length" when an answer of it reached its token limit, else "stop"; under
"abort" when the client left before the end, and under "error" when the engine failed. No label comes from a request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine_core.wire.client import STEP_TIME_BOUNDS, STEP_TOKEN_BOUNDS, RequestTimes, Status
from frontend.recoveries import Recoveries

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 20.0),
)
REQUEST_S: Final = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS: Final = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
SMALL: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
PREEMPTIONS: Final = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
REASONS: Final = ("stop", "length", "abort", "error")


class Metrics:
    """The counters of one server, in a registry of its own.

    Args:
        model_name: the label of all samples.
        status: the engine's latest report, None before the first.
        clock: seconds, monotonic.
        recoveries: counts of replaced processes.
    """

    def __init__(
        self,
        model_name: str,
        status: Callable[[], Status | None],
        clock: Callable[[], float] = time.monotonic,
        *,
        recoveries: Callable[[], Recoveries | None] = lambda: None,
    ) -> None:
        self.clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(model_name, status))
        self._registry.register(RecoveryCollector(model_name, recoveries))
        self._model = model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that gave a token.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Of these, taken from the prefix cache.")
        self.tokens = TokenCollector(model_name)
        self._registry.register(self.tokens)
        self._success = Counter(
            "tercet_request_success", "Requests that ended.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._rejections = Counter(
            "tercet_admission_rejections", "Requests refused.", ["model_name", "reason"], registry=self._registry
        )
        self._cuts = Counter(
            "tercet_http_connections_ended",
            "Connections that the server ended, by the limit they passed.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self.finished = {reason: self._success.labels(model_name, reason) for reason in REASONS}
        self.first_token = self._histogram("time_to_first_token_seconds", "Request to first token.", FIRST_TOKEN_S)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first, by answer.", TOKEN_S
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "Request to last token.", REQUEST_S)
        self.queued = self._histogram("request_queue_time_seconds", "In the waiting queue.", REQUEST_S)
        self.prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", REQUEST_S)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last.", REQUEST_S)
        self.inference = self._histogram("request_inference_time_seconds", "Prefill and decode.", REQUEST_S)
        self.prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.answer_size = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.params_n = self._histogram("request_params_n", "Answers asked for.", SMALL)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "Token limit asked for.", TOKENS)
        self.preemptions = self._histogram("request_num_preemptions", "Preemptions of an answer.", PREEMPTIONS)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tercet_{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(f"tercet_{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._model)

    def rejected(self, reason: str) -> None:
        """A request was refused; `reason` is one of the server's own codes."""
        self._rejections.labels(self._model, reason).inc()

    def connection_cut(self, reason: str) -> None:
        """A connection was ended; `reason` is one of the server's own words."""
        self._cuts.labels(self._model, reason).inc()

    def answer_ended(self, times: RequestTimes | None, tokens: int) -> None:
        """One answer of a request ended in the engine."""
        self.answer_size.observe(tokens)
        if times is not None:
            self.queued.observe(times.queued)
            self.prefill.observe(times.prefill)
            self.decode.observe(times.decode)
            self.inference.observe(times.prefill + times.decode)
            self.preemptions.observe(times.preemptions)
            if tokens > 1:
                self.per_token.observe(times.decode / (tokens - 1))

    def text(self) -> bytes:
        """All samples."""
        return generate_latest(self._registry)


class RequestClock:
    """Times one request.

    Args:
        metrics: where to.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = metrics.clock()
        self._last: dict[int, float] = {}
        self.first_token_s: float | None = None

    def tokens(self, answer: int, count: int) -> None:
        """`count` tokens came for answer `answer`."""
        if not count:
            return
        now = self._metrics.clock()
        if self.first_token_s is None:
            self.first_token_s = now - self._started
            self._metrics.first_token.observe(self.first_token_s)
        self._metrics.tokens.add(count, now - self._last.get(answer, now), timed=answer in self._last)
        self._last[answer] = now

    def end(self, reason: str) -> float:
        """The request ended; gives its seconds."""
        seconds = self._metrics.clock() - self._started
        self._metrics.finished[reason].inc()
        self._metrics.whole.observe(seconds)
        return seconds


class TokenCollector(Collector):
    """Counts every token of every answer, so it does no more than add: prometheus_client's own take ten times as long.

    Args:
        model_name: the label.
    """

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._count = 0
        self._gaps = [0] * (len(TOKEN_S) + 1)
        self._seconds = 0.0

    def add(self, count: int, seconds: float, *, timed: bool) -> None:
        """`count` tokens came, `seconds` after the one before them if they are `timed`."""
        self._count += count
        if timed:
            self._gaps[bisect_left(TOKEN_S, seconds / count)] += count
            self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """The families, for one reading."""
        yield _counter(self._model, "generation_tokens", "Tokens in answers.", self._count)
        name, text = "tercet_inter_token_latency_seconds", "Between tokens of an answer."
        yield _histogram(self._model, name, text, TOKEN_S, self._gaps, self._seconds)


# Name, help, and how to read it from a Status.
GAUGES: Final[tuple[tuple[str, str, Callable[[Status], float]], ...]] = (
    ("num_requests_running", "Requests in the running batch.", lambda status: status.running),
    ("num_requests_waiting", "Requests that wait.", lambda status: status.waiting),
    (
        "kv_cache_usage_perc",
        "Share of KV blocks that live requests hold (1 is all).",
        lambda status: status.kv_blocks_used / status.kv_blocks_total if status.kv_blocks_total else 0.0,
    ),
    ("oldest_wait_seconds", "Age of the longest waiting request.", lambda status: status.oldest_wait_s),
    ("engine_step_age_seconds", "Since the last step while there is work.", lambda status: status.step_age_s),
    ("engine_epoch", "Incarnation of the executor.", lambda status: status.epoch),
)
COUNTERS: Final[tuple[tuple[str, str, Callable[[Status], float]], ...]] = (
    ("num_preemptions", "Requests that lost their KV blocks.", lambda status: status.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda status: status.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found there.", lambda status: status.prefix_hits),
    ("engine_prompt_tokens", "Prompt tokens of all clients' requests.", lambda status: status.prompt_tokens),
    ("engine_cached_tokens", "Of these, from the prefix cache.", lambda status: status.cached_tokens),
    ("engine_generation_tokens", "Tokens generated for all clients.", lambda status: status.generation_tokens),
    ("engine_steps", "Finished steps.", lambda status: status.steps),
    ("engine_malformed_frames", "Frames that were no message.", lambda status: status.malformed_frames),
    ("engine_stale_results", "Results of an earlier executor or step.", lambda status: status.stale_results),
)


class RecoveryCollector(Collector):
    """Samples of replaced processes; nothing before the first connection.

    Args:
        model_name: the label.
        recoveries: the counts.
    """

    def __init__(self, model_name: str, recoveries: Callable[[], Recoveries | None]) -> None:
        self._model = model_name
        self._recoveries = recoveries

    def collect(self) -> Iterator[Metric]:
        """The families, for one reading."""
        counts = self._recoveries()
        if counts is None:
            return
        for name, text, count in (
            ("executor_restarts", "Executors that took the place of a lost one.", counts.executor_restarts),
            ("engine_restarts", "Engine cores that took the place of a lost one.", counts.engine_restarts),
            ("requests_recovered", "Open requests that went on after a loss, each time.", counts.requests),
        ):
            yield _counter(self._model, name, text, count)
        gauge = GaugeMetricFamily(
            "tercet_recovery_seconds",
            "From the latest loss of a process to its successor's readiness.",
            labels=["model_name", "process"],
        )
        gauge.add_metric([self._model, "executor"], counts.executor_s)
        gauge.add_metric([self._model, "engine"], counts.engine_s)
        yield gauge


class EngineCollector(Collector):
    """Samples out of the engine's latest Status; nothing before the first.

    Args:
        model_name: the label.
        status: the latest report.
    """

    def __init__(self, model_name: str, status: Callable[[], Status | None]) -> None:
        self._model = model_name
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """The families, for one reading."""
        status = self._status()
        if status is None:
            return
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(f"tercet_{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], read(status))
            yield gauge
        for name, text, read in COUNTERS:
            yield _counter(self._model, name, text, read(status))
        yield from self._by_label(status)
        for name, bounds, counts, total in (
            ("engine_step_time_seconds", STEP_TIME_BOUNDS, status.step_time_buckets, status.step_time_s),
            ("iteration_tokens_total", STEP_TOKEN_BOUNDS, status.step_token_buckets, status.step_tokens),
        ):
            yield _histogram(self._model, f"tercet_{name}", "Of the engine's steps.", bounds, counts, total)

    def _by_label(self, status: Status) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "tercet_num_requests_waiting_by_reason", "Requests that wait, by reason.", labels=["model_name", "reason"]
        )
        for reason in sorted({"capacity", "deferred"} | status.waiting_by_reason.keys()):
            waiting.add_metric([self._model, reason], status.waiting_by_reason.get(reason, 0))
        yield waiting
        for name, text, counts in (
            ("engine_requests_finished", "Requests of all clients that ended.", status.finished),
            ("engine_requests_rejected", "Submissions of all clients that were refused.", status.rejected),
        ):
            family = CounterMetricFamily(f"tercet_{name}", text, labels=["model_name", "reason"])
            for reason, count in sorted(counts.items()):
                family.add_metric([self._model, reason], count)
            yield family


def _counter(model: str, name: str, text: str, count: float) -> Metric:
    family = CounterMetricFamily(f"tercet_{name}", text, labels=["model_name"])
    family.add_metric([model], count)
    return family


def _histogram(
    model: str, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Metric:
    """A family out of counts by bucket; the last one is for what is beyond all bounds."""
    family = HistogramMetricFamily(name, text, labels=["model_name"])
    buckets: list[tuple[str, float]] = []
    seen = 0
    known = counts if len(counts) == len(bounds) + 1 else [0] * (len(bounds) + 1)
    names = (*(str(float(bound)) for bound in bounds), "+Inf")
    for bound, count in zip(names, known, strict=True):
        seen += count
        buckets.append((bound, seen))
    family.add_metric([model], buckets, total)
    return family
