"""Which module reads which architecture. A family is imported when a model of it is opened, never before."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from model_executor.errors import UnknownArchitecture
from model_executor.models.config import ConfigFile
from model_executor.models.spec import ModelSpec
from model_executor.weights.parameters import NameTable

ARCHITECTURES: Final = {
    "LlamaForCausalLM": "model_executor.models.llama:llama",
    "MistralForCausalLM": "model_executor.models.llama:mistral",
    "Qwen2ForCausalLM": "model_executor.models.qwen:qwen2",
    "Qwen3ForCausalLM": "model_executor.models.qwen:qwen3",
    "Gemma2ForCausalLM": "model_executor.models.gemma:gemma2",
    "Gemma3ForCausalLM": "model_executor.models.gemma:gemma3",
    "Gemma3ForConditionalGeneration": "model_executor.models.gemma:gemma3_conditional",
    "MixtralForCausalLM": "model_executor.models.mixtral:mixtral",
    "Qwen3MoeForCausalLM": "model_executor.models.qwen_moe:qwen3_moe",
    "DeepseekV2ForCausalLM": "model_executor.models.deepseek:deepseek_v2",
    "DeepseekV3ForCausalLM": "model_executor.models.deepseek:deepseek_v3",
}
MODEL_TYPES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""For a config.json that names no architecture."""


@dataclass(frozen=True)
class Family:
    """All that tells one model family from another.

    Attributes:
        read: makes the spec of a config.json.
        names: what the checkpoint calls the parameters.
        section: field of config.json that holds what belongs to the blocks; None: the whole does.
    """

    read: Callable[[ConfigFile], ModelSpec]
    names: NameTable
    section: str | None = None


def find_family(config: ConfigFile) -> Family:
    """The family of the architecture that config.json names.

    Raises:
        UnknownArchitecture: not one of ARCHITECTURES.
    """
    architecture = architecture_of(config)
    if architecture not in ARCHITECTURES:
        raise UnknownArchitecture(architecture, ARCHITECTURES, config.path)
    return family(architecture)


def family(architecture: str) -> Family:
    """The family of a known architecture."""
    module, _, attribute = ARCHITECTURES[architecture].partition(":")
    made = getattr(importlib.import_module(module), attribute)()
    assert isinstance(made, Family)
    return made


def architecture_of(config: ConfigFile) -> str:
    """The architecture that config.json names, or that its model_type stands for.

    Raises:
        ConfigRefused: the two contradict each other.
    """
    names = config.strings("architectures")
    model_type = config.string("model_type", "")
    if not names:
        return MODEL_TYPES.get(model_type, model_type or "none")
    if len(names) > 1:
        raise config.refuse("architectures", "one name")
    # transformers chooses by model_type: a contradiction would mean another model there than here.
    if names[0] in ARCHITECTURES and model_type and MODEL_TYPES.get(model_type) != names[0]:
        raise config.refuse("model_type", f"not the type of {names[0]}")
    return names[0]
