from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_executor.errors import ConfigRefused
from model_executor.models.config import ConfigFile
from model_executor.models.layer_types import (
    FULL,
    SLIDING,
    read_layer_types,
    read_layer_window,
    slides_by_depth,
    slides_by_period,
)


def config(**fields: Any) -> ConfigFile:
    """A config of four layers with these fields."""
    return ConfigFile(Path("config.json"), {"num_hidden_layers": 4, **fields})


def test_layer_types_go_before_the_older_fields() -> None:
    older = (True, True, False, False)
    assert read_layer_types(config(), older) == (SLIDING, SLIDING, FULL, FULL)
    assert read_layer_types(config(layer_types=[FULL, SLIDING, SLIDING, FULL]), older) == (FULL, SLIDING, SLIDING, FULL)


@pytest.mark.parametrize("types", [[FULL] * 3, [FULL] * 5, [FULL, "chunked_attention", FULL, FULL]], ids=str)
def test_layer_types_that_do_not_fit(types: list[str]) -> None:
    with pytest.raises(ConfigRefused, match="layer_types"):
        read_layer_types(config(layer_types=types), (True,) * 4)


@pytest.mark.parametrize(
    ("fields", "used", "window"),
    [
        ({}, True, 4096),
        ({"sliding_window": 5}, True, 5),
        ({"sliding_window": 5, "use_sliding_window": True}, False, 5),
    ],
    ids=str,
)
def test_window(fields: dict[str, Any], used: bool, window: int) -> None:
    assert read_layer_window(config(**fields), (FULL, SLIDING), used=used) == window
    assert read_layer_window(config(**fields), (FULL, FULL), used=used) is None


@pytest.mark.parametrize(
    ("fields", "used", "culprit"),
    [
        ({"sliding_window": None}, True, "sliding_window"),
        ({"sliding_window": 5}, False, "use_sliding_window"),
        ({"sliding_window": 5, "use_sliding_window": False}, True, "use_sliding_window"),
        ({"sliding_window": -1}, True, "sliding_window"),
    ],
    ids=str,
)
def test_windows_refused(fields: dict[str, Any], used: bool, culprit: str) -> None:
    with pytest.raises(ConfigRefused, match=culprit) as caught:
        read_layer_window(config(**fields), (FULL, SLIDING), used=used)
    assert caught.value.field == culprit


@pytest.mark.parametrize(
    ("fields", "sliding"),
    [
        ({}, [False, False, False, False]),
        ({"use_sliding_window": True}, [False, False, False, False]),
        ({"use_sliding_window": True, "max_window_layers": 3}, [False, False, False, True]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [True, True, True, True]),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, [False] * 4),
        ({"use_sliding_window": False, "max_window_layers": 0}, [False] * 4),
    ],
    ids=str,
)
def test_slides_by_depth(fields: dict[str, Any], sliding: list[bool]) -> None:
    assert list(slides_by_depth(config(**fields))) == sliding


@pytest.mark.parametrize(
    ("period", "sliding"),
    [(1, [False] * 4), (2, [True, False, True, False]), (3, [True, True, False, True]), (6, [True] * 4)],
)
def test_slides_by_period(period: int, sliding: list[bool]) -> None:
    assert list(slides_by_period(config(), period)) == sliding
