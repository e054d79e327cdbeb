"""`tercet cut` is listed, and its help is the program's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from frontend.cli import cut
from frontend.cli.main import main
from tests.arch.source import ROOT


def test_the_list_of_commands_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert any(line.split()[:1] == ["cut"] for line in capsys.readouterr().out.splitlines())


def test_the_help_is_the_program_s_own() -> None:
    command = [sys.executable, "-m", "frontend", "cut", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert done.stdout.startswith("usage: tercet cut")
    assert "--layers" in done.stdout
    assert cut.MODULE == "model_executor.tools.cut"
