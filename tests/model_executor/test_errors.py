from __future__ import annotations

from pathlib import Path

from model_executor.errors import UnknownArchitecture, WeightsRefused


def test_names_out_of_files_keep_the_message_on_one_line() -> None:
    """A tensor may be called anything, and half of a surrogate pair cannot be sent."""
    refused = WeightsRefused(Path("m\u00fc"), unexpected=["a\nb", "c\ud800"])
    assert str(refused) == "m\u00fc: 2 unexpected: a\\nb, c\\ud800"
    assert str(UnknownArchitecture("a\tb", ["x"], Path("c"))) == "c: architectures: a\\tb is unknown; known: x"
