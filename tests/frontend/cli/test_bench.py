"""`tercet bench` as a process: the benchmarks are reached from the command, and errors are one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.__main__ import COMMANDS
from tests.arch.source import ROOT


def tercet(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "frontend", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_a_benchmark_it_lists_them() -> None:
    done = tercet("bench")
    assert done.returncode == 0, done.stderr
    assert all(f"  {name}" in done.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "error: tercet bench: no benchmark 'nothing'"),
        (["serve"], "error: --base-url, --serve: give one of them"),
        (["serve", "--base-url", "ftp://x"], "error: --base-url: 'ftp://x'"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(words: list[str], message: str) -> None:
    done = tercet("bench", *words, *(["--model", "m"] if len(words) > 1 else []))
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
