"""Run records."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bench.errors import RecordInvalid, UsageError
from bench.record import hardware, make_record, read_record, write_record
from bench.sources import ROOT, digest


def test_a_record_tells_where_and_when_and_of_which_code(tmp_path: Path) -> None:
    made = make_record("serve", ["tercet", "bench"], [{"a": 1.5}], raw=[[1]], seeds={"x": 1}, config={"f": None})
    path = tmp_path / "folder" / "record.json"
    write_record(made, path)
    read = read_record(path)
    assert read == made
    assert datetime.now(UTC) - datetime.fromisoformat(read.date) < timedelta(minutes=5)
    assert {"commit", "changed files", "lock", "torch", "python"} <= set(read.environment)
    assert read.sources["frontend/app.py"] == digest(ROOT / "frontend" / "app.py")
    assert {name.split("/")[0] for name in read.sources} == {"frontend", "engine_core", "model_executor"}


def test_the_machine_is_described() -> None:
    found = hardware()
    assert found.cores == len(os.sched_getaffinity(0)) <= found.machine_cores
    assert found.memory > 2**28
    assert found.processor


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff"])
def test_what_is_no_record_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(RecordInvalid, match=r"record\.json"):
        read_record(path)


def test_a_record_that_cannot_be_written_is_a_wrong_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--result-file"):
        write_record(make_record("serve", [], []), tmp_path / "file" / "record.json")
