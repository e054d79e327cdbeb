"""Flags of the proving commands, and their files."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from engine_core.wire.evidence import Check
from frontend.errors import UsageError
from frontend.proof.options import add_model_flags, model_flags, write_report


def test_flags_are_passed_on() -> None:
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    plain = parser.parse_args(["m"])
    numbers = ["--dtype", "auto", "--quantization", "none", "--kv-cache-dtype", "auto"]
    assert model_flags(plain) == ["--layers", "full", *numbers]
    words = ["--layers", "0,3", "--allow-missing-classes", "--dtype", "float16"]
    words += ["--quantization", "int8", "--kv-cache-dtype", "bfloat16"]
    assert model_flags(parser.parse_args(["m", *words])) == words


def test_reports_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_report(path, Check("a", True, "b"))
    assert '"name": "a"' in path.read_text(encoding="utf-8")
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(UsageError, match="report"):
        write_report(path / "report.json", Check("a", True, "b"))
