"""A report tells where it was made, and what could not be told."""

from __future__ import annotations

import subprocess
from pathlib import Path

from frontend.proof.surroundings import surroundings
from tests.frontend.proof.examples import ENVIRONMENT


def test_a_source_tree_with_commits(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        options = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", "-C", str(tmp_path), *options, *words], text=True).strip()

    git("init", "-q")
    (tmp_path / "requirements.lock").write_text("a==1\n", encoding="utf-8")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "more").touch()
    found = surroundings(ENVIRONMENT, tmp_path)
    assert found["commit"] == git("rev-parse", "HEAD")
    assert found["changed files"] == "1"
    assert len(found["lock"]) == 16
    assert (found["machine"], found["device"], found["threads"]) == ("a processor", "cpu", "2")


def test_nothing_but_an_installed_package(tmp_path: Path) -> None:
    found = surroundings(None, tmp_path)
    assert (found["commit"], found["changed files"], found["lock"]) == ("unknown", "unknown", "unknown")
    assert "machine" not in found
    assert found["torch"] != "not installed"
