"""Model folders of every family with several blocks of each class, and what transformers makes of a cut of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from model_executor.tools.cut import main
from model_executor.weights.cut_assets import RECORD
from model_executor.weights.index import Checkpoint
from tests.fixtures import expert_families, families
from tests.fixtures.bbpe import Bbpe, write_bbpe
from tests.fixtures.llama import Shape, write_rand
from tests.fixtures.reference import Reference
from tests.fixtures.safetensors_file import write_checkpoint
from tests.fixtures.vision import write_conditional

SIX: Final = Shape(hidden=32, layers=6, heads=4, kv_heads=2, intermediate=48, vocab=320, max_position=128)

# Choices of blocks whose kinds a model of so few blocks would not have by itself.
KEPT: Final[Mapping[str, tuple[int, ...]]] = {
    "llama": (0, 2, 5),
    "llama-tied": (1, 4),
    **families.KEPT,
    "gemma3": (0, 3, 5),
    "mixtral": (1, 4),
    "qwen3-moe": (1, 2, 5),
    "deepseek-v2": (0, 3, 5),
    "deepseek-v2-lite": (2, 4),
    "deepseek-v3": (1, 3, 4),
}


def write_model(folder: Path, name: str) -> Path:
    """Write the model of this name, in shards where its fixture has them, with a tokenizer."""
    if name.startswith("llama"):
        config = {"tie_word_embeddings": True} if name == "llama-tied" else {}
        shape = Shape(**{**SIX.__dict__, "tied": name == "llama-tied"})
        return write_rand(folder, shape=shape, shards=7, config=config)
    if name in families.FAMILIES:
        families.write_family(folder, name, shards=3)
    elif name == "gemma3":
        write_conditional(folder, shards=3)
    else:
        expert_families.write_experts(folder, name)
    write_bbpe(folder, Bbpe(size=320))
    return folder


def spread(folder: Path) -> Path:
    """Give every tensor of a folder a file of its own."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor.numpy() for file in files for name, tensor in load_file(file).items()}
    for file in files:
        file.unlink()
    write_checkpoint(folder, tensors, shards=len(tensors))
    return folder


def keep(model: Any, sources: Sequence[int]) -> None:
    """Remove the other blocks of a model of transformers in memory."""
    if getattr(model.config.get_text_config(), "layer_types", None):
        families.keep_layers(model, tuple(sources))
    else:
        expert_families.keep_blocks(model, sources)


def digests(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def record(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return made


def fields(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return made


def tensors(folder: Path) -> dict[str, bytes]:
    """Bytes of every tensor."""
    checkpoint = Checkpoint.open(folder)
    entries = checkpoint.entries(checkpoint.files)
    return {name: checkpoint.path(e.file).read_bytes()[e.begin : e.end] for name, e in entries.items()}


def cut(source: Path, out: Path, sources: Sequence[int], *flags: str) -> Path:
    """Cut by the program; gives the folder."""
    layers = ",".join(map(str, sources))
    assert main([str(source), str(out), "--layers", layers, "--allow-missing-classes", *flags]) == 0
    return out


@dataclass(frozen=True)
class Both:
    """Logits at each position of one prompt.

    Attributes:
        removed: of the source with the other blocks removed in memory.
        cut: of the cut checkpoint.
        faults: keys that transformers missed, or did not expect, in the cut checkpoint.
    """

    removed: NDArray[np.float32]
    cut: NDArray[np.float32]
    faults: list[str]


def in_transformers(source: Path, out: Path, sources: Sequence[int], prompt: Sequence[int]) -> Both:
    """Load the cut in transformers, and compare it with the source."""
    from transformers import AutoModelForCausalLM

    whole = Reference(source)
    keep(whole.model, sources)
    model, info = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, local_files_only=True, attn_implementation="eager", output_loading_info=True
    )
    faults = [f"{kind}: {key}" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind]]
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([list(prompt)]), use_cache=False).logits[0].float().numpy()
    return Both(whole.logits(prompt), np.asarray(logits, dtype=np.float32), faults)
