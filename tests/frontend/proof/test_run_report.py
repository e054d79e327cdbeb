"""Every proof of a report runs with the flags of the report, and is repeated by a command that has them too."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from frontend.cli import report as command
from frontend.errors import EXIT_FAILED, StartRefused
from frontend.proof import run_report
from frontend.proof.report import Report
from tests.frontend.proof.examples import plan

NUMBERS = ["--dtype", "bfloat16", "--quantization", "int8", "--kv-cache-dtype", "float16"]
BLOCKS = ["--layers", "0,3", "--allow-missing-classes"]
STARTED = ("cover", "run_tool", "run_reference", "OwnServer")


class Known:
    """A tokenizer as far as it is asked."""

    vocab_size = 96


def recorder(given: list[list[str]]) -> Callable[..., NoReturn]:
    """Notes all texts that it is called with, and starts nothing."""

    def start(*arguments: Any) -> NoReturn:
        texts = [each if isinstance(each, list) else [str(each)] for each in arguments]
        given.append([text for each in texts for text in each])
        raise StartRefused("not here")

    return start


def test_the_flags_reach_every_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    written: list[Report] = []
    for name in STARTED:
        monkeypatch.setattr(run_report, name, recorder(given))
    monkeypatch.setattr(run_report, "read_plan", lambda *_: plan())
    monkeypatch.setattr(run_report, "write", lambda report, *_: written.append(report))
    monkeypatch.setattr("frontend.tokenizer.load.load_tokenizer", lambda _: Known())
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    words = ["report", str(tmp_path), *BLOCKS, *NUMBERS, "--out", str(tmp_path / "out")]
    assert command.run(parser.parse_args(words)) == EXIT_FAILED
    assert len(given) == len(STARTED) + 1  # both tools
    assert all(set(BLOCKS) | set(NUMBERS) <= set(each) for each in given)
    (report,) = written
    commands = {part.name: part.command for part in report.parts}
    for name in ("coverage", "probe", "parity", "sentinel"):
        assert set(BLOCKS) | set(NUMBERS) <= set(commands[name])
