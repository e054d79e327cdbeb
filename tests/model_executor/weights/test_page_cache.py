from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from model_executor.weights.page_cache import resident_share

PAGES = 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file on disk, none of it in the page cache if the file system lets go of it."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def test_cold_then_warm(file: Path) -> None:
    whole = {file: [(0, PAGES * mmap.PAGESIZE)]}
    cold = resident_share(whole)
    if cold == 1.0:
        pytest.skip("the file system of the temporary folder keeps every page in memory")
    assert cold == 0.0
    file.read_bytes()
    assert resident_share(whole) == 1.0


def test_warm(file: Path) -> None:
    file.read_bytes()
    assert resident_share({file: [(0, 10), (5 * mmap.PAGESIZE, 7 * mmap.PAGESIZE)]}) == 1.0


def test_nothing_asked(file: Path) -> None:
    assert resident_share({}) is None
    assert resident_share({file: []}) is None


def test_a_file_of_another_user(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 2**31)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert resident_share({file: [(0, 10)]}) is None
