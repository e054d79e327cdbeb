"""A model folder as the tools read it: configuration, structure and list of tensors, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from engine_core.wire.config import ModelOptions
from model_executor.models.config import ConfigFile
from model_executor.models.fields import QUANTIZATION
from model_executor.models.registry import find_family
from model_executor.models.spec import ModelSpec
from model_executor.weights.index import INDEX, SINGLE, Checkpoint
from model_executor.weights.layer_plan import LayerPlan, choose_layers
from model_executor.weights.parameters import NameTable, Parameter, plan_parameters

# Files that some quantization tools write beside config.json, with module paths in them.
QUANTIZATION_FILES: Final = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


class OpenModel(Struct, frozen=True):
    """What is known of a model folder before any tensor is read.

    Attributes:
        config: its config.json.
        names: of its tensors.
        section: field of config.json that holds what belongs to the blocks; None: the whole does.
        spec: its structure, quantization aside.
        checkpoint: its tensors; None: the folder holds no weights.
    """

    config: ConfigFile
    names: NameTable
    section: str | None
    spec: ModelSpec
    checkpoint: Checkpoint | None

    @property
    def quantization(self) -> str | None:
        """What says that weights are quantized, and how; None: nothing does."""
        for field in QUANTIZATION:
            if (found := self.config.section(field)) is not None:
                block = found.indices("weight_block_size")
                size = f" in blocks of {' x '.join(map(str, block))}" if block else ""
                return f"{field}: {found.string('quant_method', 'of an unknown method')}{size}"
        folder = self.config.path.parent
        return next((name for name in QUANTIZATION_FILES if (folder / name).is_file()), None)

    def parameters(self, plan: LayerPlan) -> tuple[Parameter, ...]:
        """What a plan makes of the checkpoint, quantization aside."""
        return plan_parameters(self.spec, plan, self.names)

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
    spec = read_structure(config.path, config.fields)
    family = find_family(config)
    there = (folder / SINGLE).exists() or (folder / INDEX).exists()
    checkpoint = Checkpoint.open(folder, cut=cut) if there else None
    names = family.names if checkpoint is None else family.names.of(checkpoint.files)
    return OpenModel(config, names, family.section, spec, checkpoint)


def read_structure(path: Path, fields: Mapping[str, Any]) -> ModelSpec:
    """The structure that a configuration gives; what it says of quantization is left aside.

    Raises:
        UnknownArchitecture, ConfigRefused: as the server would refuse it.
    """
    config = ConfigFile(path, {name: value for name, value in fields.items() if name not in QUANTIZATION})
    return find_family(config).read(config)
