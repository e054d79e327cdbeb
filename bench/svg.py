"""Charts as SVG, drawn by hand so that a report needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from bench.charts import Bar, Chart, Curve

WIDTH: Final = 720
LABELS: Final = 190
ROW: Final = 26
PLOT: Final = 260
MARGIN: Final = 40
COLOURS: Final = ("#3366aa", "#cc6633", "#339966", "#993399", "#888833", "#444444")


def draw(chart: Chart) -> str:
    """The chart as one svg element."""
    body = "".join(_bars(chart.bars, chart.unit) if chart.bars else _curves(chart.curves, chart.unit))
    height = MARGIN + (ROW * len(chart.bars) if chart.bars else PLOT + MARGIN + 18 * len(chart.curves))
    title = f'<text x="0" y="18" font-weight="bold">{escape(f"{chart.title} ({chart.unit})")}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12" role="img">{title}{body}</svg>'
    )


def _bars(bars: Sequence[Bar], unit: str) -> Iterator[str]:
    most = max(max(bar.high for bar in bars), 1e-12)
    room = WIDTH - LABELS - 110
    for index, bar in enumerate(bars):
        y = MARGIN + index * ROW
        length, low, high = (room * max(value, 0.0) / most for value in (bar.value, bar.low, bar.high))
        yield f'<text x="{LABELS - 8}" y="{y + 12}" text-anchor="end">{escape(bar.label)}</text>'
        yield f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="16" fill="{COLOURS[0]}"/>'
        if bar.high > bar.low:
            yield (
                f'<path d="M{LABELS + low:.1f} {y + 8}H{LABELS + high:.1f}M{LABELS + low:.1f} {y + 3}v10'
                f'M{LABELS + high:.1f} {y + 3}v10" stroke="#000" fill="none"/>'
            )
        yield f'<text x="{LABELS + max(length, high) + 6:.1f}" y="{y + 12}">{bar.value:.4g} {escape(unit)}</text>'


def _curves(curves: Sequence[Curve], unit: str) -> Iterator[str]:
    most = max((curve.points[-1][0] for curve in curves), default=1.0) or 1.0
    room, bottom = WIDTH - MARGIN - 20, MARGIN + PLOT
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        y = bottom - PLOT * share
        yield f'<path d="M{MARGIN} {y:.1f}H{MARGIN + room}" stroke="#ddd"/>'
        yield f'<text x="{MARGIN - 4}" y="{y + 4:.1f}" text-anchor="end" font-size="9">{share:g}</text>'
    for tick in _ticks(most):
        x = MARGIN + room * tick / most
        yield f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" font-size="10">{tick:g} {escape(unit)}</text>'
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(f"{MARGIN + room * x / most:.1f},{bottom - PLOT * y:.1f}" for x, y in curve.points)
        y = bottom + 34 + 18 * index
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        yield f'<rect x="{MARGIN}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{MARGIN + 16}" y="{y}">{escape(curve.label)}</text>'


def _ticks(most: float) -> list[float]:
    """About five round numbers from 0 up to `most`."""
    step = 10 ** math.floor(math.log10(most / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 6)
    return [step * index for index in range(int(most / step) + 1)]
