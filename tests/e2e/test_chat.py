"""`tercet chat` against a real server, its input from a pipe."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.scripts import CHAT_TEXT
from tests.e2e.server import ROOT, Server


@pytest.mark.parametrize("way", ["--url", "--socket"])
def test_a_conversation(chain_server: Server, way: str) -> None:
    address = chain_server.url if way == "--url" else str(chain_server.socket)
    done = subprocess.run(
        [sys.executable, "-m", "frontend", "chat", way, address, "--temperature", "0"],
        cwd=ROOT,
        input="hi\nand again\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(CHAT_TEXT) == 2


def test_a_server_that_is_not_there() -> None:
    command = [sys.executable, "-m", "frontend", "chat", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, cwd=ROOT, input="hi\n", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr
