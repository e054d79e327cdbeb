"""Where the records of the fault matrix go."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option."""
    parser.addoption("--fault-record", metavar="FILE", help="keep the records of the fault matrix here, as JSON")
