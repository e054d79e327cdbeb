"""scripts/serve from any folder: set-up, then the server in the script's own process."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import ROOT, wait_for

PROGRAM = ROOT / "scripts" / "serve"
STUB = '#!/bin/sh\necho "${0##*/}"\nfor word; do echo "$word"; done\n'
DEFAULT = ["CACHE/smollm2-135m-instruct", "--served-model-name", "smollm2-135m-instruct"]


def told(root: Path, *arguments: str) -> list[list[str]]:
    """The programs that the script runs in a checkout of stubs, in order, each with its arguments."""
    for name in ("scripts/setup", ".venv/bin/python", ".venv/bin/tercet"):
        stub = root / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(STUB)
        stub.chmod(0o700)
    script = shutil.copy(PROGRAM, root / "scripts" / "serve")
    environment = os.environ | {"TERCET_CACHE": "CACHE"}
    done = subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, check=True, timeout=30)
    runs: list[list[str]] = []
    for line in done.stdout.splitlines():
        if line in ("setup", "python", "tercet"):
            runs.append([])
        runs[-1].append(line)
    return runs


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--port", "8001"],
        ["--port=8001"],
        ["-h"],
        ["--no-enable-kv-cache"],
        ["--quantization", "int8", "--layers", "0 - 3"],
        ["--api-key", "--config-of-mine"],
    ],
)
def test_without_a_model_it_is_the_default_one(tmp_path: Path, arguments: list[str]) -> None:
    setup, made, served = told(tmp_path, *arguments)
    assert setup == ["setup"]
    assert made == ["python", str(tmp_path / "scripts" / "default_model.py"), "--cache", "CACHE"]
    assert served == ["tercet", "serve", *DEFAULT, *arguments]


@pytest.mark.parametrize(
    "arguments",
    [
        ["MODEL"],
        ["some models/one", "--port", "8001"],
        ["--config", "FILE"],
        ["--config=FILE", "--port", "8001"],
        ["--port", "8001", "--config", "FILE"],
    ],
)
def test_a_named_model_is_served(tmp_path: Path, arguments: list[str]) -> None:
    assert told(tmp_path, *arguments) == [["setup"], ["tercet", "serve", *arguments]]


@pytest.mark.slow
def test_serve_starts_and_ends(tmp_path: Path, chain_folder: Path) -> None:
    log = tmp_path / "log"
    command = [str(PROGRAM), str(chain_folder), "--port", "0", "--num-kv-blocks", "64"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for("ready server", lambda: "ready in" in log.read_text() or process.poll() is not None, 900)
        assert "curl" in log.read_text()
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)
