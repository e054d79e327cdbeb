"""A load as figures, under the names that vLLM's serving benchmark gives them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from bench.answer import Answer
from bench.errors import UsageError
from bench.load import Load
from bench.samples import deviation, mean, percentile

METRICS: Final = ("ttft", "tpot", "itl", "e2el")
DEFINITIONS: Final = {
    "duration": "seconds from the first request of the run to the end of its last answer; the warm-up is before it",
    "completed": "requests whose answer came whole; failed: all others, which count in no other figure",
    "total_input_tokens": "prompt tokens of completed requests, as the server counted them",
    "total_output_tokens": "answer tokens of completed requests, as the server counted them",
    "request_throughput": "completed requests a second of duration",
    "output_throughput": "answer tokens a second of duration",
    "total_token_throughput": "prompt and answer tokens a second of duration",
    "request_goodput": "completed requests that met every limit of --goodput, a second of duration",
    "ttft": "milliseconds from sending a request to the first event with a part of its answer",
    "tpot": "milliseconds a token after the first: (e2el - ttft) / (tokens - 1) of each request with 2 tokens or more",
    "itl": "milliseconds between neighbouring events of an answer, over all answers",
    "e2el": "milliseconds from sending a request to the last event with a part of its answer",
    "max_output_tokens_per_s": "most events in one of the seconds of the run",
    "max_concurrent_requests": "most requests under way at once",
    "p99_send_delay_ms": "how late requests were sent (limit of concurrency, or a slow client)",
    "client_cpu_us_per_token": "processor microseconds of the client a token of the answers",
    "percentiles": "by a straight line between neighbouring samples",
}


class Wanted(Struct, frozen=True):
    """Which figures.

    Attributes:
        metrics: out of METRICS.
        percentiles: 0 .. 100, of each of them.
        goodput: limits in milliseconds by metric; none: no goodput.
    """

    metrics: tuple[str, ...] = METRICS
    percentiles: tuple[float, ...] = (90.0, 99.0)
    goodput: Mapping[str, float] = {}


def parse_metrics(text: str) -> tuple[str, ...]:
    """The metrics in "ttft,itl".

    Raises:
        UsageError: one is not known.
    """
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := set(found) - set(METRICS):
        raise UsageError(f"--percentile-metrics: {', '.join(sorted(unknown))}; known: {', '.join(METRICS)}")
    return found


def parse_percentiles(text: str) -> tuple[float, ...]:
    """The percentiles in "50,99".

    Raises:
        UsageError: one is no number from 0 to 100.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--metric-percentiles: {error}") from error
    if not all(0 <= value <= 100 for value in found):
        raise UsageError(f"--metric-percentiles: from 0 to 100, not {text}")
    return found


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """The limits in ["ttft:200", "e2el:4000"].

    Raises:
        UsageError: one is no METRIC:MILLISECONDS.
    """
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError as error:
            raise UsageError(f"--goodput: {pair!r} is no METRIC:MILLISECONDS") from error
        if name not in {"ttft", "tpot", "e2el"} or not 0 <= limits[name] < math.inf:
            raise UsageError(f"--goodput: {pair!r}: limits are for ttft, tpot and e2el, in milliseconds")
    return limits


def figures(load: Load, wanted: Wanted) -> dict[str, object]:
    """All figures of a run; see DEFINITIONS."""
    done = [answer for answer in load.answers if not answer.error]
    read = sum(answer.input_tokens for answer in done)
    made = sum(answer.output_tokens for answer in done)
    late = [1000 * (answer.sent - answer.due) for answer in load.answers if answer.sent]
    found: dict[str, object] = {
        "duration": load.seconds,
        "completed": len(done),
        "failed": len(load.answers) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": len(done) / load.seconds,
        "output_throughput": made / load.seconds,
        "total_token_throughput": (read + made) / load.seconds,
        "max_output_tokens_per_s": _busiest_second(done),
        "max_concurrent_requests": _most_at_once(load.answers),
        "p99_send_delay_ms": percentile(late, 99),
        "client_cpu_us_per_token": 1e6 * load.cpu_s / max(1, made),
    }
    if wanted.goodput:
        good = sum(_is_good(answer, wanted.goodput) for answer in done)
        found["request_goodput"] = good / load.seconds
    by_metric = samples(done)
    for metric in wanted.metrics:
        found |= _statistics(metric, by_metric[metric], wanted.percentiles)
    return found


def samples(done: Sequence[Answer]) -> dict[str, list[float]]:
    """Milliseconds by metric."""
    return {
        "ttft": [1000 * answer.ttft for answer in done],
        "tpot": [1000 * answer.tpot for answer in done if answer.tpot is not None],
        "itl": [1000 * gap for answer in done for gap in answer.gaps],
        "e2el": [1000 * answer.e2el for answer in done],
    }


def _statistics(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, object]:
    named = {f"p{percent:g}_{metric}_ms": percentile(values, percent) for percent in percentiles}
    return {
        f"mean_{metric}_ms": mean(values),
        f"median_{metric}_ms": percentile(values, 50),
        f"std_{metric}_ms": deviation(values),
        **named,
    }


def _is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    times = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.e2el}
    return all(1000 * times[name] <= limit for name, limit in limits.items())


def _busiest_second(done: Sequence[Answer]) -> int:
    began = min((answer.sent for answer in done), default=0.0)
    seconds = Counter(int(when - began) for answer in done for when in answer.arrivals)
    return max(seconds.values(), default=0)


def _most_at_once(answers: Sequence[Answer]) -> int:
    # An end before a start at the same moment.
    edges = sorted([(one.sent, 1) for one in answers if one.sent] + [(one.ended, -1) for one in answers if one.sent])
    now = most = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


def raw(load: Load) -> dict[str, object]:
    """The samples themselves, in seconds with 5 decimals, one entry a request, in the order of sending."""
    began = min((answer.sent for answer in load.answers if answer.sent), default=0.0)
    return {
        "start_times": [_short(answer.sent - began) for answer in load.answers],
        "ttfts": [_short(answer.ttft) for answer in load.answers],
        "itls": [[_short(gap) for gap in answer.gaps] for answer in load.answers],
        "input_lens": [answer.input_tokens for answer in load.answers],
        "output_lens": [answer.output_tokens for answer in load.answers],
        "errors": [answer.error for answer in load.answers],
    }


def _short(seconds: float) -> float:
    return round(seconds, 5)
