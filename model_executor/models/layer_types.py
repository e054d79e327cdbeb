"""Which blocks of a model have a sliding window: by `layer_types`, or by the family's older fields."""

from __future__ import annotations

from typing import Final

from model_executor.models.config import ConfigFile

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
DEFAULT_WINDOW: Final = 4096
"""transformers' value of an absent `sliding_window`, in every family that is read here."""


def read_layer_types(config: ConfigFile, sliding: tuple[bool, ...]) -> tuple[str, ...]:
    """SLIDING or FULL for each block.

    Args:
        config: the whole config.json.
        sliding: what the family's older fields say of each block; `layer_types` goes before them.

    Raises:
        ConfigRefused: another number of types than of blocks, or a type that is neither of the two.
    """
    types = config.strings("layer_types")
    if not types:
        return tuple(SLIDING if one else FULL for one in sliding)
    if len(types) != len(sliding):
        raise config.refuse("layer_types", f"{len(types)} entries for num_hidden_layers = {len(sliding)}")
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise config.refuse("layer_types", f"{', '.join(unknown)} unknown; known: {FULL}, {SLIDING}")
    return types


def read_layer_window(config: ConfigFile, types: tuple[str, ...], *, used: bool) -> int | None:
    """The window of the blocks that slide; None when none does.

    Args:
        config: the whole config.json.
        types: of the blocks.
        used: the family's value of an absent `use_sliding_window`.

    Raises:
        ConfigRefused: a block is to slide and there is no window.
    """
    if SLIDING not in types:
        return None
    if not config.flag("use_sliding_window", default=used):
        raise config.refuse("use_sliding_window", f"must be true, as {types.count(SLIDING)} blocks slide")
    if "sliding_window" in config.fields and "sliding_window" not in config:
        raise config.refuse("sliding_window", f"is required, as {types.count(SLIDING)} blocks slide")
    return config.count("sliding_window", DEFAULT_WINDOW)


def slides_by_depth(config: ConfigFile) -> tuple[bool, ...]:
    """Qwen: with `use_sliding_window` the blocks from `max_window_layers` on slide."""
    layers = config.count("num_hidden_layers")
    windowed = "sliding_window" in config or "sliding_window" not in config.fields
    if not (windowed and config.flag("use_sliding_window", default=False)):
        return (False,) * layers
    first = config.count("max_window_layers", 28, least=0)
    return tuple(layer >= first for layer in range(layers))


def slides_by_period(config: ConfigFile, period: int) -> tuple[bool, ...]:
    """Gemma: every block slides but the last one of each period."""
    return tuple((layer + 1) % period != 0 for layer in range(config.count("num_hidden_layers")))
