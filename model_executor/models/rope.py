"""The rotation that a config.json asks for.

transformers 4 writes it as `rope_scaling` and `rope_theta`, transformers 5 as `rope_parameters`. Defaults and
precedence are transformers': a non-empty `rope_scaling` goes before `rope_parameters`, `rope_type` before `type`, a
`rope_theta` in the section before the one outside, `original_max_position_embeddings` outside before the one inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from model_executor.errors import ConfigRefused
from model_executor.models.config import COUNT_LIMIT, ConfigFile
from model_executor.models.layer_types import FULL, SLIDING
from model_executor.models.spec import RopeSpec

DEFAULT_THETA: Final = 10000.0
DEFAULT_FULL_THETA: Final = 1000000.0
"""Of full blocks, in families whose sliding blocks have a rotation of their own."""


def read_rope(config: ConfigFile, rotary_dim: int, max_position: int) -> RopeSpec:
    """The rotation of a model whose blocks all share one.

    Args:
        config: the whole config.json.
        rotary_dim: elements of a head that are rotated.
        max_position: the model's max_position_embeddings.

    Raises:
        ConfigRefused: an unknown rope_type, a missing or impossible value, sections per layer type, an odd head_dim.
    """
    theta = config.number("rope_theta", DEFAULT_THETA)
    section = config.section("rope_scaling") or config.section("rope_parameters") or _empty(config)
    return _rope(_with_original(config, section, max_position), theta, rotary_dim, max_position)


def read_layer_ropes(config: ConfigFile, rotary_dim: int, max_position: int) -> dict[str, RopeSpec]:
    """The rotations of a model whose sliding blocks have one of their own, by layer type (Gemma 3).

    transformers 5 writes a section of `rope_parameters` for each layer type; in transformers 4 `rope_theta` and
    `rope_scaling` speak of the full blocks and `rope_local_base_freq` of the sliding ones.

    Args:
        config, rotary_dim, max_position: as of `read_rope`.

    Raises:
        ConfigRefused: as of `read_rope`, and one section for all layer types.
    """
    sections = config.section("rope_parameters") or _empty(config)
    for field in sections.fields:
        if field not in (FULL, SLIDING):
            raise sections.refuse(field, f"a section for each layer type is needed: {FULL}, {SLIDING}")
    full, sliding = (sections.section(kind) or _empty(sections, kind) for kind in (FULL, SLIDING))
    scaling = config.section("rope_scaling")
    if scaling is not None:
        full = ConfigFile(config.path, {**full.fields, **scaling.fields}, scaling.prefix)
    thetas = (config.number("rope_theta", DEFAULT_FULL_THETA), config.number("rope_local_base_freq", DEFAULT_THETA))
    return {
        kind: _rope(_with_original(_empty(config), section, max_position), theta, rotary_dim, max_position)
        for kind, section, theta in zip((FULL, SLIDING), (full, sliding), thetas, strict=True)
    }


def _rope(section: ConfigFile, theta: float, rotary_dim: int, max_position: int) -> RopeSpec:
    nested = [key for key, value in section.fields.items() if isinstance(value, dict)]
    if nested:
        raise section.refuse(nested[0], "one rotation for all layers is possible")
    if section.number("partial_rotary_factor", 1.0) != 1.0:
        raise section.refuse("partial_rotary_factor", "all elements of a head are rotated here")
    kind = _kind(section)
    theta = section.number("rope_theta", theta)
    if theta <= 1:
        raise ConfigRefused("rope_theta", theta, "must be above 1", section.path)
    if rotary_dim % 2 or rotary_dim < 4:
        raise ConfigRefused("head_dim", rotary_dim, "a rotation needs an even number of at least 4", section.path)
    given = _READERS[kind](section, max_position)
    plain: dict[str, Any] = {"kind": kind, "theta": theta, "rotary_dim": rotary_dim, "reach": max_position}
    return RopeSpec(**{**plain, **given})


def _empty(config: ConfigFile, field: str = "rope_parameters") -> ConfigFile:
    return ConfigFile(config.path, {}, f"{config.prefix}{field}.")


def _kind(section: ConfigFile) -> str:
    field = "rope_type" if "rope_type" in section else "type"
    kind = section.string(field, "default")
    if kind not in _READERS:
        raise section.refuse(field, f"known: {', '.join(_READERS)}")
    return kind


def _with_original(config: ConfigFile, section: ConfigFile, max_position: int) -> ConfigFile:
    original = config.count("original_max_position_embeddings", 0)
    original = original or section.count("original_max_position_embeddings", max_position)
    fields = {**section.fields, "original_max_position_embeddings": original}
    return ConfigFile(section.path, fields, section.prefix)


def _default(section: ConfigFile, max_position: int) -> dict[str, Any]:
    del section, max_position
    return {}


def _linear(section: ConfigFile, max_position: int) -> dict[str, Any]:
    factor = _factor(section)
    return {"factor": factor, "reach": _reach(section, max_position, max_position * factor)}


def _dynamic(section: ConfigFile, max_position: int) -> dict[str, Any]:
    """Beyond max_position the angles of all tokens would change with every further token: the reach ends there."""
    del max_position
    return {"factor": _factor(section)}


def _llama3(section: ConfigFile, max_position: int) -> dict[str, Any]:
    del max_position
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if not 0 < low < high:
        raise section.refuse("low_freq_factor", f"must be above 0 and below high_freq_factor, {high:g}")
    return {
        "factor": _factor(section),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position": section.count("original_max_position_embeddings"),
    }


def _yarn(section: ConfigFile, max_position: int) -> dict[str, Any]:
    original = section.count("original_max_position_embeddings")
    absent = "factor" in section.fields and section.fields["factor"] is None
    factor = max_position / original if absent else _factor(section)
    return {
        "factor": factor,
        "original_max_position": original,
        "beta_fast": section.number("beta_fast", 32.0) or 32.0,
        "beta_slow": section.number("beta_slow", 1.0) or 1.0,
        "truncate": section.flag("truncate", default="truncate" not in section.fields),
        "attention_factor": _yarn_attention_factor(section, factor),
        "reach": _reach(section, max_position, original * factor),
    }


def _yarn_attention_factor(section: ConfigFile, factor: float) -> float:
    if "attention_factor" in section:
        return section.number("attention_factor")
    mscale, all_dim = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return magnitude(factor, mscale) / magnitude(factor, all_dim)
    return magnitude(factor, 1.0)


def magnitude(factor: float, mscale: float) -> float:
    """What yarn multiplies queries and keys by at this factor."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _reach(section: ConfigFile, max_position: int, stretched: float) -> int:
    if stretched >= COUNT_LIMIT:
        raise section.refuse("factor", f"makes {stretched:g} positions, of which there are fewer than {COUNT_LIMIT}")
    return max(max_position, int(stretched))


def _factor(section: ConfigFile) -> float:
    factor = section.number("factor")
    if factor <= 0:
        raise section.refuse("factor", "must be above 0")
    return factor


_READERS: Final[Mapping[str, Callable[[ConfigFile, int], dict[str, Any]]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
