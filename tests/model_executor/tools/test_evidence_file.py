"""Reports are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine_core.wire.evidence import Check
from model_executor.tools.evidence_file import write_json

CHECK = Check("name", True, "evidence")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    path.write_text("old", encoding="utf-8")
    write_json(str(path), CHECK)
    assert msgspec.json.decode(path.read_bytes(), type=Check) == CHECK
    assert list(tmp_path.iterdir()) == [path]


def test_no_file_is_written_without_a_name() -> None:
    write_json(None, CHECK)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_json(str(tmp_path / "nowhere" / "check.json"), CHECK)
