"""One server for the tests of the endpoints; tests that change it make their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.live import LiveServer
from tests.fixtures.chain import Chain

# Each script begins with a byte that ends the prompt of the test that uses it.
SCRIPTS: tuple[tuple[str | bytes, ...], ...] = (
    ("A", "ABC", "DEF", "G", "HI", "J", "K"),
    ("B", "one", "\n\r", "\u2028", "\u2029", "\x85", "\x00", "two", "<|end|>"),
    ("C", "xx", "<|tool|>", "yy", "<|end_turn|>"),
    ("D", b"\xf0\x9f", b"\x98\x80", "cut", b"\xe4\xbd"),
    ("E", "..."),
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model speaks SCRIPTS."""
    with LiveServer(tmp_path_factory.mktemp("live"), Chain(scripts=SCRIPTS)) as server:
        yield server
