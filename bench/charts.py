"""What is drawn of a record: bars with their spread, and distributions of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from bench.record import Record
from bench.samples import percentile

POINTS: Final = 200


class Bar(Struct, frozen=True):
    """A measurement, with the smallest and largest of its repeats."""

    label: str
    value: float
    low: float
    high: float


class Curve(Struct, frozen=True):
    """A distribution: (value, share of the samples that are no larger), ascending."""

    label: str
    points: list[tuple[float, float]]


class Chart(Struct, frozen=True):
    """One picture; it has bars, or curves.

    Attributes:
        title, unit: of the values.
    """

    title: str
    unit: str
    bars: list[Bar] = []
    curves: list[Curve] = []


def charts(record: Record) -> list[Chart]:
    """The pictures of a record; none for a kind that has no picture."""
    make = {
        "serve": _serve,
        "throughput": _throughput,
        "startup": _startup,
        "cost": _cost,
        "compare": _compare,
        "ablate": _ablate,
        "micro": _micro,
    }.get(record.kind)
    return [] if make is None else [chart for chart in make(record) if chart.bars or chart.curves]


def distribution(label: str, samples: Sequence[float]) -> Curve:
    """The share of samples below each value, at POINTS places."""
    places = [index / POINTS for index in range(POINTS + 1)]
    return Curve(label, [(percentile(samples, 100 * place), place) for place in places])


def _plain(label: str, value: float) -> Bar:
    return Bar(label, value, value, value)


def _serve(record: Record) -> list[Chart]:
    labels = [_load_label(result) for result in record.results]
    rates = [_plain(label, one["output_throughput"]) for label, one in zip(labels, record.results, strict=True)]
    found = [Chart("Output throughput", "tokens/s", rates)]
    for name, title in (("ttfts", "Time to first token"), ("itls", "Inter-token latency")):
        curves = []
        for label, raw in zip(labels, record.raw, strict=True):
            samples = [1000 * value for value in _flat(raw[name])]
            if samples:
                curves.append(distribution(label, samples))
        found.append(Chart(title, "ms", curves=curves))
    return found


def _load_label(result: Mapping[str, Any]) -> str:
    clients, rate = result.get("max_concurrency"), result.get("request_rate")
    parts = [f"{clients} clients"] if clients else []
    return ", ".join([*parts, f"{rate} requests/s"] if rate != "inf" or not parts else parts)


def _flat(values: Sequence[Any]) -> list[float]:
    return [number for value in values for number in (value if isinstance(value, list) else [value])]


def _throughput(record: Record) -> list[Chart]:
    bars = [
        Bar(f"{one['num_prompts']} requests", one["output_throughput"], one["low"], one["high"])
        for one in record.results
    ]
    return [Chart("Output throughput of the engine", "tokens/s", bars)]


def _startup(record: Record) -> list[Chart]:
    ready = [Bar(one["start"], one["ready_s"], one["low"], one["high"]) for one in record.results]
    last = record.results[-1]
    memory = [_plain(name.removesuffix("_mib"), last[name]) for name in last if name.endswith("_mib")]
    return [Chart("Ready after", "s", ready), Chart("Memory", "MiB", memory)]


def _cost(record: Record) -> list[Chart]:
    bars = [
        _plain(f"{one['streams']} streams, {role}", one[f"{role}_cpu_us_per_token"])
        for one in record.results
        for role in ("frontend", "core", "client")
    ]
    return [Chart("Processor time a streamed token", "us", bars)]


def _compare(record: Record) -> list[Chart]:
    figures = list(dict.fromkeys(one["figure"] for one in record.results))
    return [
        Chart(
            f"{figure}: ratio to {record.results[0]['name']}",
            "x",
            [
                Bar(one["name"], one["ratio"], one["ratio_low"], one["ratio_high"])
                for one in record.results
                if one["figure"] == figure
            ],
        )
        for figure in figures
    ]


def _ablate(record: Record) -> list[Chart]:
    found = []
    for load in ("plain", "shared"):
        for figure, unit in (("output_throughput", "tokens/s"), ("median_ttft_ms", "ms"), ("median_itl_ms", "ms")):
            bars = [_spread_bar(one["set"], one[load][figure]) for one in record.results]
            found.append(Chart(f"{figure}, {load} prompts", unit, bars))
    return [*found, Chart("Memory", "MiB", [_spread_bar(one["set"], one["memory_mib"]) for one in record.results])]


def _spread_bar(label: str, spread: Mapping[str, float]) -> Bar:
    return Bar(label, spread["median"], spread["low"], spread["high"])


def _micro(record: Record) -> list[Chart]:
    bars = [_plain(one["name"], 100 * one["fraction"]) for one in record.results if "fraction" in one]
    return [Chart("Kernels, share of the roofline", "%", bars)]
