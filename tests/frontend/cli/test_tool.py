"""Commands that are handed over to another program."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

import pytest

from frontend.cli.main import COMMANDS, main
from frontend.cli.tool import Tool
from tests.arch.source import ROOT

TOOLS = [name for name, found in COMMANDS.items() if isinstance(found, Tool)]


class Replaced(Exception):
    """What execv would have become."""


@pytest.mark.parametrize("name", TOOLS)
def test_the_words_go_over_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def execv(path: str, words: list[str]) -> NoReturn:
        raise Replaced(path, *words)

    monkeypatch.setattr(os, "execv", execv)
    words = ["m", "--layers", "0,3", "--help", "--", "-x", "serve"]
    with pytest.raises(Replaced) as caught:
        main([name, *words])
    module = "bench" if name == "bench" else f"model_executor.tools.{name}"
    assert caught.value.args == (sys.executable, sys.executable, "-m", module, *words)


def test_the_list_of_commands_tells_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(TOOLS) == 4
    assert set(TOOLS) <= set(listed)


@pytest.mark.parametrize("name", ["plan", "cut"])
def test_the_help_is_the_program_s_own(name: str) -> None:
    command = [sys.executable, "-m", "frontend", name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert done.stdout.startswith(f"usage: tercet {name}")
    assert "--layers" in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["plan", "--layrs"], 2, "error: tercet plan: "),
        (["plan", "nowhere"], 3, "error: nowhere: no such folder"),
        (["cut", "nowhere", "out"], 2, "--layers"),
        (["cut", "nowhere", "out", "--layers", "0"], 3, "error: nowhere: no such folder"),
    ],
)
def test_errors_and_exit_codes_come_through(words: list[str], status: int, text: str) -> None:
    command = [sys.executable, "-m", "frontend", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == status
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
