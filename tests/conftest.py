"""Model folders shared by all tests. They are read only: a test that changes one makes its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.chain import write_chain
from tests.fixtures.llama import write_rand
from tests.model_executor import interpreted  # noqa: F401 - before anything imports triton


@pytest.fixture(scope="session")
def chain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CHAIN without scripts: letters follow letters."""
    return write_chain(tmp_path_factory.mktemp("chain") / "chain")


@pytest.fixture(scope="session")
def rand_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND in float32."""
    return write_rand(tmp_path_factory.mktemp("rand") / "rand")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder; tests that use it carry the mark `real_model`."""
    from scripts.default_model import default_cache, find_source, make

    return make(default_cache(), find_source())
