"""What tests of benchmarks share."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import ablate, engine, serve, startup, target
from bench.cost import SCRIPT
from frontend.proof.own_server import OwnServer
from tests.arch.source import ROOT
from tests.fakes.live import LiveServer
from tests.fixtures.chain import Chain, write_chain


@pytest.fixture
def unused_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    """The HTTP application over a fake core."""
    with LiveServer(tmp_path) as server:
        server.core.step_s = 0.001
        yield server


@pytest.fixture
def modelless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder; servers that benchmarks start for it have the real processes, but an executor without a model."""
    for module in (ablate, engine, serve, startup):
        monkeypatch.setattr(module, "OwnServer", functools.partial(OwnServer, program="bench.modelless"))
    monkeypatch.setenv(SCRIPT, "vocab=300,delay_s=0.002")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    folder = write_chain(tmp_path / "model", Chain())
    monkeypatch.setattr(target, "default_model", lambda: folder)
    return folder
