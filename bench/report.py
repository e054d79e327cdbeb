"""`tercet bench report RECORD... --out FILE.html`: run records as one page that needs nothing else, and as PNG."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from bench.charts import Chart, charts
from bench.errors import UsageError
from bench.record import Record, read_record
from bench.svg import draw

STYLE: Final = (
    "body{font-family:sans-serif;margin:2em auto;max-width:60em}table{border-collapse:collapse;font-size:13px}"
    "td,th{border:1px solid #ccc;padding:3px 7px;text-align:right}td:first-child,th:first-child{text-align:left}"
    "svg{display:block;margin:1em 0}.wide{overflow-x:auto}pre{white-space:pre-wrap}"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="files of --result-file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page")
    parser.add_argument("--png", type=Path, metavar="DIR", help="a PNG for each chart; needs matplotlib (extra: bench)")


def run(args: argparse.Namespace) -> int:
    """Write what was asked for."""
    if args.out is None and args.png is None:
        raise UsageError("--out, --png: give at least one of them")
    read = {path.stem: read_record(path) for path in args.records}
    try:
        if args.out is not None:
            args.out.write_text(page(read), encoding="utf-8")
            print(args.out)
        if args.png is not None:
            args.png.mkdir(parents=True, exist_ok=True)
            for path in write_png(read, args.png):
                print(path)
    except OSError as error:
        raise UsageError(f"--out, --png: {error}") from error
    return 0


def page(records: Mapping[str, Record]) -> str:
    """The whole page."""
    parts = "".join(_section(name, record) for name, record in records.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Measurements</title>'
        f"<style>{STYLE}</style></head><body><h1>Measurements</h1>{parts}</body></html>\n"
    )


def _section(name: str, record: Record) -> str:
    drawn = "".join(draw(chart) for chart in charts(record))
    machine = record.hardware
    facts = {
        "command": shlex.join(record.command),
        "date": record.date,
        "machine": f"{machine.processor}, {machine.cores} cores, {', '.join(machine.flags)}",
        **record.environment,
        **{f"seed of {what}": seed for what, seed in record.seeds.items()},
        **{f"data of {what}": digest for what, digest in record.data.items()},
    }
    return (
        f"<h2>{escape(name)}: {escape(record.kind)}</h2>{drawn}<div class=wide>{_table(record.results)}</div>"
        f"<details><summary>How it was measured</summary>{_pairs(facts)}<h3>Definitions</h3>"
        f"{_pairs(record.definitions)}</details>"
    )


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    flat = [dict(_flat("", result)) for result in results]
    names = list(dict.fromkeys(name for one in flat for name in one))
    head = "".join(f"<th>{escape(name)}</th>" for name in ["figure", *(f"run {index}" for index in range(len(flat)))])
    # A row for each figure: there are more of them than of runs.
    body = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(_short(one.get(name)))}</td>' for one in flat)}</tr>"
        for name in names
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _flat(prefix: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(f"{prefix}{key} ", inner)]
    return [(prefix.strip(), value)]


def _pairs(facts: Mapping[str, object]) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(_short(text))}</td></tr>" for name, text in facts.items())
    return f"<table>{rows}</table>"


def _short(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def write_png(records: Mapping[str, Record], folder: Path) -> list[Path]:
    """A file for each chart of each record.

    Raises:
        UsageError: matplotlib is not installed.
    """
    drawn = [(f"{name}-{index}", chart) for name, one in records.items() for index, chart in enumerate(charts(one))]
    return [_png(chart, folder / f"{name}.png") for name, chart in tqdm(drawn, unit="chart", disable=None)]


def _png(chart: Chart, path: Path) -> Path:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--png: needs matplotlib: pip install 'tercet[bench]'") from error
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(chart.bars) if chart.bars else 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(chart.title)
    axes.set_xlabel(chart.unit)
    if chart.bars:
        values = [bar.value for bar in chart.bars]
        errors = [[bar.value - bar.low for bar in chart.bars], [bar.high - bar.value for bar in chart.bars]]
        axes.barh([bar.label for bar in chart.bars], values, xerr=errors, capsize=3)
        axes.invert_yaxis()
    for curve in chart.curves:
        axes.plot([x for x, _ in curve.points], [y for _, y in curve.points], label=curve.label)
    if chart.curves:
        axes.set_ylabel("share of samples")
        axes.legend()
    figure.savefig(path, dpi=150)
    return path
