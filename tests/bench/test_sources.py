"""Digests that change only with what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sources import digest, source_digests

CODE = '''"""A module."""

import os


class A:
    """A class."""

    x: int = 1

    def f(self, a: int, *, b: str = "c") -> str:
        """A method."""
        return f"{a}{b!r}"  # a comment
'''


def of(folder: Path, content: str, name: str = "a.py") -> str:
    """The digest of a file with this content."""
    path = folder / name
    path.write_text(content)
    return digest(path)


def test_comments_docstrings_and_form_do_not_count(tmp_path: Path) -> None:
    other = CODE.replace("A method.", "Other words.").replace("  # a comment", "").replace('"c"', "'c'")
    assert of(tmp_path, CODE) == of(tmp_path, other.replace("\n\n\n", "\n\n"))


@pytest.mark.parametrize(
    ("old", "new"),
    [("x: int = 1", "x: int = 2"), ("b!r", "b!s"), ("*, b", "b"), ("import os", "import sys"), ("-> str", "-> object")],
)
def test_everything_else_does(old: str, new: str, tmp_path: Path) -> None:
    assert of(tmp_path, CODE) != of(tmp_path, CODE.replace(old, new))


def test_a_text_that_is_used_is_no_docstring(tmp_path: Path) -> None:
    assert of(tmp_path, "x = 'a'") != of(tmp_path, "x = 'b'")
    assert of(tmp_path, "def f():\n    return 'a'") != of(tmp_path, "def f():\n    return 'b'")


def test_the_digest_is_the_same_in_every_python(tmp_path: Path) -> None:
    assert of(tmp_path, CODE) == "c294ca5e71456ca3"


def test_every_byte_of_other_files_counts(tmp_path: Path) -> None:
    assert of(tmp_path, "int x; // a", "a.c") != of(tmp_path, "int x; // b", "a.c")


def test_files_folders_and_globs_name_files_below_the_root(tmp_path: Path) -> None:
    for name in ("p/a.py", "p/q/b.py", "p/q/c.txt", "r.md", "p/d.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert list(source_digests(["p"], tmp_path)) == ["p/a.py", "p/q/b.py", "p/q/c.txt"]
    assert list(source_digests(["p/q/", "r.md"], tmp_path)) == ["p/q/b.py", "p/q/c.txt", "r.md"]
    assert list(source_digests(["p/*/*.py"], tmp_path)) == ["p/q/b.py"]
    assert source_digests(["nothing"], tmp_path) == {}
