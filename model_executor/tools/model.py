"""A model folder as the tools read it: configuration, structure and list of tensors, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from engine_core.wire.config import ModelOptions
from model_executor.models.config import ConfigFile
from model_executor.models.registry import Family, find_family
from model_executor.models.spec import ModelSpec
from model_executor.weights.index import INDEX, SINGLE, Checkpoint
from model_executor.weights.layer_plan import LayerPlan, choose_layers

QUANTIZATION: Final = ("quantization_config", "compression_config")


class OpenModel(Struct, frozen=True):
    """What is known of a model folder before any tensor is read.

    Attributes:
        config: its config.json.
        family: of its architecture.
        spec: its structure, quantization aside.
        checkpoint: its tensors; None: the folder holds no weights.
    """

    config: ConfigFile
    family: Family
    spec: ModelSpec
    checkpoint: Checkpoint | None

    @property
    def quantized(self) -> bool:
        """Whether config.json speaks of quantization."""
        return any(field in self.config for field in QUANTIZATION)

    def plan(self, layers: str, *, allow_missing_classes: bool) -> LayerPlan:
        """The plan for a choice of blocks, as `tercet serve` would make it.

        Raises:
            LayersRefused: there is no such plan.
        """
        options = ModelOptions(layers=layers, allow_missing_classes=allow_missing_classes)
        return choose_layers(self.spec, options)


def open_model(folder: Path, *, cut: bool = False) -> OpenModel:
    """Read config.json and the list of tensors.

    Args:
        folder: the model folder.
        cut: whether weight files may end before their data does.

    Raises:
        CheckpointBroken, UnknownArchitecture, ConfigRefused: as the server would refuse it.
    """
    config = ConfigFile.read(folder / "config.json")
    family, spec = read_structure(config.path, config.fields)
    there = (folder / SINGLE).exists() or (folder / INDEX).exists()
    return OpenModel(config, family, spec, Checkpoint.open(folder, cut=cut) if there else None)


def read_structure(path: Path, fields: Mapping[str, Any]) -> tuple[Family, ModelSpec]:
    """Family and structure of a configuration; what it says of quantization is left aside.

    Raises:
        UnknownArchitecture, ConfigRefused: as the server would refuse it.
    """
    config = ConfigFile(path, {name: value for name, value in fields.items() if name not in QUANTIZATION})
    family = find_family(config)
    return family, family.read(config)
