"""Servers shared by the tests of one file: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.scripts import CHAIN
from tests.e2e.server import Server
from tests.fixtures.chain import write_chain


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CHAIN with the scripts of tests/e2e/scripts.py."""
    return write_chain(tmp_path_factory.mktemp("scripted") / "chain", CHAIN)


@pytest.fixture(scope="module")
def chain_server(scripted_folder: Path) -> Iterator[Server]:
    """A server on CHAIN; its name for the model is "chain"."""
    with Server(scripted_folder, "--served-model-name", "chain", "--num-kv-blocks", "512") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def rand_server(rand_folder: Path) -> Iterator[Server]:
    """A server on RAND with small steps: a prompt over 32 tokens takes several."""
    flags = ("--max-num-batched-tokens", "32", "--block-size", "16", "--num-kv-blocks", "512")
    with Server(rand_folder, "--served-model-name", "rand", *flags) as server:
        yield server.wait_ready()
