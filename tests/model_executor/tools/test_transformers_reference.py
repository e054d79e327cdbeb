"""The reference engine shows every border of a block, and widens what it computes in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model_executor.errors import CheckpointBroken
from model_executor.tools.observe import LOGITS
from model_executor.tools.parity import reference_folder
from model_executor.tools.transformers_reference import TransformersReference
from tests.fixtures.reference import Reference
from tests.model_executor.tools.folders import KEPT, keep, write_model

PROMPT = list(range(30))


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3", "qwen2", "deepseek-v3"])
def test_some_blocks_are_what_is_left_without_the_others(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", name)
    sources = KEPT[name]
    names = [f"block {index}" for index in range(len(sources))]
    with reference_folder(folder, ",".join(map(str, sources)), allow_missing_classes=True) as some:
        made = TransformersReference(some, names, torch.float32).forced(PROMPT)
    assert not some.exists()
    expected = Reference(folder)
    keep(expected.model, sources)
    assert list(made) == ["embedding", *names, "final norm", LOGITS]
    assert np.abs(made[LOGITS].numpy() - expected.logits(PROMPT)).max() < 1e-5


def test_a_wider_dtype_is_computed_in(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    names = [f"block {index}" for index in range(6)]
    narrow, wide = (
        TransformersReference(folder, names, dtype).forced(PROMPT) for dtype in (torch.float32, torch.float64)
    )
    assert {values.dtype for values in wide.values()} == {torch.float64}
    error = (narrow[LOGITS] - wide[LOGITS]).abs().max() / wide[LOGITS].abs().max()
    assert 0 < float(error) < 1e-5


def test_greedy_tokens_stay_below_the_vocabulary(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    reference = TransformersReference(folder, [f"block {index}" for index in range(6)], torch.float32)
    assert max(reference.greedy([1, 2, 3], 8, 4)) < 4


def test_a_folder_that_transformers_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointBroken, match="transformers cannot load it"):
        TransformersReference(tmp_path, ["a"], torch.float32)
