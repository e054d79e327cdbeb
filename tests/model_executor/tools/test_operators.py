"""Every kind of block that can be built has its operators listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_executor.models import decoder
from model_executor.tools.model import open_model
from model_executor.tools.operators import (
    ATTENTION_OPERATORS,
    MLP_OPERATORS,
    REQUESTS,
    block_operators,
    outer_operators,
    special_requests,
)
from tests.fixtures.expert_families import write_experts
from tests.fixtures.families import write_family


def test_every_kind_is_listed() -> None:
    assert ATTENTION_OPERATORS.keys() == decoder.ATTENTION.keys()
    assert MLP_OPERATORS.keys() == decoder.MLP.keys()
    assert set(REQUESTS) == {"prefill", "decode", "mixed"}


@pytest.mark.parametrize(
    ("name", "words", "others"),
    [
        ("gemma3_text", ["rms_norm: heads", "after each part", "rotary", "gate and up, gated"], ["router", "latent"]),
        ("qwen2", ["linear: qkv", "kv_append", "attention"], ["after each part", "rms_norm: heads"]),
    ],
)
def test_dense_families(tmp_path: Path, name: str, words: list[str], others: list[str]) -> None:
    spec = open_model(write_family(tmp_path, name)).spec
    text = "; ".join(block_operators(spec.layers[0]))
    assert all(word in text for word in words)
    assert not any(word in text for word in others)
    windows = {request for layer in spec.layers for request in special_requests(layer)}
    assert windows == {"a prompt longer than the window of 5 tokens"}


def test_experts(tmp_path: Path) -> None:
    spec = open_model(write_experts(tmp_path, "deepseek-v3")).spec
    dense, sparse = block_operators(spec.layers[0]), block_operators(spec.layers[5])
    assert "router" in sparse
    assert "shared experts" in sparse
    assert "router" not in dense
    assert "kv_append: latent" in dense


def test_outside_the_blocks(tmp_path: Path) -> None:
    assert "soft cap of the logits" in outer_operators(open_model(write_family(tmp_path, "gemma2")).spec)
