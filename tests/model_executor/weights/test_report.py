"""The load report: its table, and what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from model_executor.weights.report import load_table
from tests.fixtures.llama import parameter_shapes
from tests.model_executor.engine import SIX, draw, load, write_small


def test_states_files_and_bytes(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX, shards=len(parameter_shapes(SIX)))
    report = load(folder, (1, 4)).report
    text = load_table(report)
    words = [line.split() for line in text]
    assert report.counts["missing"] == report.counts["unexpected"] == 0
    for state, count in report.counts.items():
        nbytes = sum(record.nbytes for record in report.tensors if record.state == state)
        assert [state, str(count), "tensors", str(nbytes), "bytes"] in words
    assert f"  block 1 <- source block 4: {report.classes[1]}" in text
    assert f"  files: {len(report.shards_opened)} opened, {len(report.shards_skipped)} not needed" in text
    assert len(report.shards_skipped) == 36
    assert f"  bytes: {report.bytes_read} read, {report.bytes_materialized} in memory before kernels pack them" in text


@pytest.mark.parametrize(
    ("share", "word"), [(0.0, "cold, 0%"), (0.5, "partly, 50%"), (1.0, "warm, 100%"), (None, "unknown")]
)
def test_cold_and_warm(tmp_path: Path, share: float | None, word: str) -> None:
    report = structs.replace(load(write_small(tmp_path, SIX)).report, page_cache=share)
    assert load_table(report)[-1].startswith(f"  page cache: {word}")


def test_drawn_weights(tmp_path: Path) -> None:
    report = draw(write_small(tmp_path, SIX), (0, 5)).report
    assert report.layer_map == [0, 5]
    assert len(report.classes) == 2
    assert any(line.split()[:1] == ["generated"] for line in load_table(report))
