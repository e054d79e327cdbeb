"""scripts/serve from any folder: set-up, then the server in the script's own process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import ROOT, wait_for


@pytest.mark.slow
def test_serve_starts_and_ends(tmp_path: Path, chain_folder: Path) -> None:
    log = tmp_path / "log"
    command = [str(ROOT / "scripts" / "serve"), str(chain_folder), "--port", "0", "--num-kv-blocks", "64"]
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
