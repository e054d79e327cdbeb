"""From a model folder to a ModelSpec: the family of its config.json reads it."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from engine_core.wire.config import ModelOptions
from model_executor.errors import ConfigRefused
from model_executor.models.config import ConfigFile
from model_executor.models.registry import find_family
from model_executor.models.spec import ModelSpec


def read_spec(model_dir: Path, options: ModelOptions) -> ModelSpec:
    """Read config.json of a model folder.

    Args:
        model_dir: the folder.
        options: `max_model_len` is honoured here; the rest is for others.

    Raises:
        CheckpointBroken: no folder, no config.json, or no JSON object in it.
        UnknownArchitecture: a family that cannot be served.
        ConfigRefused: a field, or max_model_len, that cannot be honoured exactly.
    """
    config = ConfigFile.read(model_dir / "config.json")
    spec = find_family(config).read(config)
    return spec if options.max_model_len is None else _limited(spec, options.max_model_len)


def _limited(spec: ModelSpec, wanted: int) -> ModelSpec:
    if wanted > spec.max_model_len:
        kinds = {layer.attention.rope.kind for layer in spec.layers if layer.attention.rope is not None}
        why = f"at most {spec.max_model_len} with this model's max_position_embeddings and RoPE ({', '.join(kinds)})"
        raise ConfigRefused("max_model_len", wanted, why)
    return structs.replace(spec, max_model_len=wanted)
