"""Pictures of records of every kind, and the page that holds them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.charts import Bar, Chart, charts, distribution
from bench.record import Record, write_record
from bench.report import page
from bench.svg import draw
from tests.bench.records import record

SPREAD = {"median": 2.0, "low": 1.0, "high": 3.0, "count": 3}
LOAD: dict[str, Any] = {"output_throughput": SPREAD, "median_ttft_ms": SPREAD, "median_itl_ms": SPREAD}
RECORDS = {
    "serve": record(
        "serve",
        [
            {"max_concurrency": 1, "request_rate": "inf", "output_throughput": 5.0},
            {"max_concurrency": None, "request_rate": 3.0, "output_throughput": 7.5},
        ],
        [{"ttfts": [0.5, 0.25], "itls": [[0.1, 0.2], [0.3]]}, {"ttfts": [0.5], "itls": [[]]}],
    ),
    "throughput": record("throughput", [{"num_prompts": 8, "output_throughput": 5.0, "low": 4.0, "high": 6.0}]),
    "latency": record("latency", [{"avg_latency": 1.0, "latencies": [1.0]}]),
    "startup": record(
        "startup", [{"start": "cold", "ready_s": 5.0, "low": 4.0, "high": 6.0, "core_mib": 30.0, "total_mib": 40.0}]
    ),
    "cost": record(
        "cost",
        [{"streams": 64, **{f"{role}_cpu_us_per_token": 5.0 for role in ("frontend", "core", "client")}}],
    ),
    "compare": record(
        "compare",
        [{"name": name, "figure": "<rate>", "ratio": 1.5, "ratio_low": 1.0, "ratio_high": 2.0} for name in "ab"],
    ),
    "ablate": record("ablate", [{"set": "default", "plain": LOAD, "shared": LOAD, "memory_mib": SPREAD}]),
    "micro": record("micro", [{"name": "wire", "us": 3.0}, {"name": "kernel", "us": 3.0, "fraction": 0.5}]),
}
SVG = "{http://www.w3.org/2000/svg}"


class Links(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        self.found += [value or "" for name, value in attrs if name in {"src", "href"}]
        self.found += [tag] if tag in {"script", "link", "img"} else []


@pytest.mark.parametrize(("kind", "count"), [("serve", 3), ("latency", 0), ("ablate", 7), ("micro", 1), ("startup", 2)])
def test_a_record_has_its_pictures(kind: str, count: int) -> None:
    assert len(charts(RECORDS[kind])) == count


def test_runs_are_told_apart() -> None:
    bars = charts(RECORDS["serve"])[0].bars
    assert [(bar.label, bar.value) for bar in bars] == [("1 clients", 5.0), ("3.0 requests/s", 7.5)]


@pytest.mark.parametrize("made", RECORDS.values(), ids=RECORDS)
def test_pictures_are_whole_svg(made: Record) -> None:
    for chart in charts(made):
        root = ET.fromstring(draw(chart))
        assert len(root.findall(f"{SVG}rect")) >= max(len(chart.bars), len(chart.curves))
        assert len(root.findall(f"{SVG}polyline")) == len(chart.curves)


def test_bars_are_as_long_as_their_values() -> None:
    root = ET.fromstring(draw(Chart("t", "s", [Bar("a", 1.0, 1.0, 1.0), Bar("b", 4.0, 3.0, 4.0)])))
    one, four = (float(bar.attrib["width"]) for bar in root.findall(f"{SVG}rect"))
    assert four == pytest.approx(4 * one, rel=0.01)
    assert len(root.findall(f"{SVG}path")) == 1


def test_bars_of_nothing_are_drawn() -> None:
    ET.fromstring(draw(Chart("t", "s", [Bar("a", 0.0, 0.0, 0.0)])))


def test_a_distribution_rises_from_the_smallest_to_the_largest_sample() -> None:
    points = distribution("a", [3.0, 1.0, 2.0]).points
    assert (points[0], points[-1]) == ((1.0, 0.0), (3.0, 1.0))
    assert points == sorted(points)


def test_the_page_needs_nothing_but_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, made in RECORDS.items():
        write_record(made, tmp_path / f"{name}.json")
    out = tmp_path / "report.html"
    assert main(["report", *(str(tmp_path / f"{name}.json") for name in RECORDS), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    text = out.read_text()
    links = Links()
    links.feed(text)
    assert links.found == []
    assert "&lt;rate&gt;" in text
    assert "<rate>" not in text
    for part in ("A processor", "2026-01-02", "what it is", "tercet bench serve"):
        assert part in text


def test_figures_of_all_runs_stand_side_by_side() -> None:
    text = page({"x": RECORDS["serve"]})
    assert "<td>output_throughput</td><td>5</td><td>7.5</td>" in text


def test_png_of_every_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    write_record(RECORDS["serve"], path)
    assert main(["report", str(path), "--png", str(tmp_path / "png")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [one.name for one in written] == ["s-0.png", "s-1.png", "s-2.png"]
    assert all(one.read_bytes().startswith(b"\x89PNG") for one in written)


def test_wrong_files_and_flags_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nothing.json"), "--out", "x"]) == 2
    assert "nothing.json" in capsys.readouterr().err
    assert main(["report", "x"]) == 2
    assert "--out, --png" in capsys.readouterr().err
