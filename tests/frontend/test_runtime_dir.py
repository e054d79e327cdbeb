"""The private directory: its rights, its removal, and what killed servers left."""

from __future__ import annotations

import os
import time
from pathlib import Path

from frontend.runtime_dir import GRACE_S, LOCK, PREFIX, RuntimeDir, base_dir, sweep


def test_it_is_private_and_goes_away(tmp_path: Path) -> None:
    made = RuntimeDir.create(tmp_path)
    assert made.path.parent == tmp_path
    assert made.path.stat().st_mode & 0o777 == 0o700
    (made.path / "core.sock").touch()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_directories_in_use_stay(tmp_path: Path) -> None:
    first, second = RuntimeDir.create(tmp_path), RuntimeDir.create(tmp_path)
    assert sweep(tmp_path) == 0
    assert first.path.exists()
    first.remove()
    second.remove()


def test_those_of_killed_servers_go(tmp_path: Path) -> None:
    left = tmp_path / f"{PREFIX}left"
    left.mkdir(mode=0o700)
    (left / LOCK).touch()
    (left / "core.sock").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "other")
    assert sweep(tmp_path) == 1
    assert not left.exists()
    assert (tmp_path / "other").exists()


def test_one_that_is_being_made_stays(tmp_path: Path) -> None:
    new = tmp_path / f"{PREFIX}new"
    new.mkdir()
    assert sweep(tmp_path) == 0
    old = time.time() - GRACE_S - 1
    os.utime(new, (old, old))
    assert sweep(tmp_path) == 1


def test_where_they_go(tmp_path: Path) -> None:
    assert base_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path
    assert base_dir({"XDG_RUNTIME_DIR": str(tmp_path / "none")}) != tmp_path / "none"
    assert base_dir({}).is_dir()
