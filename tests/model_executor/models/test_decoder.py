from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from model_executor.models.decoder import Decoder
from tests.fixtures.llama import Shape
from tests.fixtures.reference import Reference
from tests.model_executor.engine import SMALL, load, write_small

PROMPT = [5, 60, 3, 3, 17, 9, 0, 63]


def drop_layers(reference: Reference, keep: list[int]) -> None:
    """Leave only these layers in a model of transformers."""
    layers = reference.model.model.layers
    reference.model.model.layers = torch.nn.ModuleList([layers[index] for index in keep])
    for index, layer in enumerate(reference.model.model.layers):
        layer.self_attn.layer_idx = index
    reference.model.config.num_hidden_layers = len(keep)


def test_layer_choices_equal_the_reference_without_the_others(tmp_path: Path) -> None:
    folder = write_small(tmp_path, Shape(hidden=32, layers=6, heads=4, kv_heads=2, intermediate=48, vocab=64))
    seen = []
    for keep in ([0, 2, 5], [5, 0], [3], list(range(6))):
        reference = Reference(folder)
        drop_layers(reference, keep)
        ours = load(folder, keep).logits(PROMPT)
        assert np.abs(ours - reference.logits(PROMPT)).max() <= 1e-4
        seen.append(ours)
    assert np.abs(seen[0] - seen[1]).max() > 0.01


def test_layers_of_one_rotation_share_its_table(tmp_path: Path) -> None:
    model = load(write_small(tmp_path)).model
    assert len(model.rotaries) == 1
    assert model.rotary_of_block == (0, 0)
    assert model.rotaries[0].cos.shape == (SMALL.max_position, SMALL.head_size // 2)


def test_tied_head_holds_no_memory(tmp_path: Path) -> None:
    tied = load(write_small(tmp_path, Shape(hidden=32, layers=1, heads=4, kv_heads=2, vocab=64, tied=True))).model
    assert isinstance(tied, Decoder)
    assert tied.tied
    assert "head.weight" not in dict(tied.named_parameters())


def test_logits_are_float32(tmp_path: Path) -> None:
    model = load(write_small(tmp_path), dtype=torch.bfloat16).model
    with torch.inference_mode():
        assert model.logits(torch.ones(3, SMALL.hidden, dtype=torch.bfloat16)).dtype == torch.float32
