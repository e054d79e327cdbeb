"""What a section found, as lines that outlive it: a section that hangs or crashes leaves what it wrote before."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

Verdict = Literal["ok", "FAIL", "-"]

COPY_BYTES = 4 * 2**30
DRY_COPY = 2**20


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        section, name: what it is about.
        value: what was measured or found.
        verdict: "-" when nothing was to be passed.
    """

    section: str
    name: str
    value: str
    verdict: Verdict


class Report:
    """Collects the lines of one section in a file.

    Args:
        section: its name.
        path: of the file, appended to.
        device: that is checked.
        dry: whether sizes are to be tiny.
    """

    def __init__(self, section: str, path: Path, device: torch.device, *, dry: bool) -> None:
        self.device = device
        self.dry = dry
        self._section = section
        self._path = path

    def check(self, name: str, passed: bool, value: str) -> None:
        """Something that must hold."""
        self._add(Line(self._section, name, value, "ok" if passed else "FAIL"))

    def note(self, name: str, value: str) -> None:
        """A figure."""
        self._add(Line(self._section, name, value, "-"))

    def _add(self, line: Line) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        print(f"{line.verdict:4} {line.section}: {line.name}: {line.value}", flush=True)  # noqa: T201


def read_lines(path: Path) -> list[Line]:
    """What sections wrote so far."""
    if not path.exists():
        return []
    return [Line(**json.loads(text)) for text in path.read_text(encoding="utf-8").splitlines()]


def table(lines: Iterable[Line]) -> str:
    """The lines in columns."""
    rows = [(line.verdict, line.section, line.name, line.value) for line in lines]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])) for row in rows
    )


def median_ms(work: Callable[[], object], device: torch.device, *, repeats: int = 20, warm_ups: int = 3) -> float:
    """Median time of one call in milliseconds, by device events on CUDA."""
    for _ in range(warm_ups):
        work()
    times = sorted(_one_ms(work, device) for _ in range(repeats))
    return times[len(times) // 2]


def graph_ms(work: Callable[[], object], device: torch.device, *, count: int) -> float:
    """Time of one call in milliseconds when a graph holds `count` of them; on CPU when they follow each other."""

    def repeated() -> None:
        for _ in range(count):
            work()

    if device.type != "cuda":
        return median_ms(repeated, device, repeats=1, warm_ups=0) / count
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated()
    return median_ms(graph.replay, device) / count


def copy_bandwidth(report: Report) -> float:
    """Bytes a second of a large copy, read and written bytes both counted."""
    size = DRY_COPY if report.dry else COPY_BYTES
    source = torch.empty(size // 2, dtype=torch.float16, device=report.device).normal_()
    target = torch.empty_like(source)
    rate = 2 * size / median_ms(lambda: target.copy_(source), report.device) * 1e3
    report.note("copy bandwidth", f"{rate / 1e12:.3f} TB/s")
    return rate


def _one_ms(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(*, dry: bool) -> torch.device:
    """CUDA, or the CPU for a dry run."""
    return torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
