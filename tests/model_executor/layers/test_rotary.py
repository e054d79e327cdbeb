"""Frequencies and rotation: by hand, then against transformers for every kind and many values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_executor.layers.rotary import Rotary, Rotation, frequencies
from model_executor.models.config import ConfigFile
from model_executor.models.rope import read_rope
from model_executor.models.spec import RopeSpec
from tests.model_executor.engine import CPU

HEADS = 2


def test_rotation_by_hand() -> None:
    """A quarter turn takes (1, 0) to (0, 1); pairs lie half a head apart."""
    quarter = torch.tensor([[math.pi / 2, 0.0]])
    heads = torch.tensor([[[1.0, 2.0, 0.0, 3.0, 9.0]]])
    out = Rotation(quarter.cos(), quarter.sin(), torch.tensor([0])).apply(heads)
    torch.testing.assert_close(out, torch.tensor([[[0.0, 2.0, 1.0, 3.0, 9.0]]]))


def test_frequencies_by_hand() -> None:
    torch.testing.assert_close(frequencies(RopeSpec("default", 10000.0, 4, 8)), torch.tensor([1.0, 0.01]))
    torch.testing.assert_close(frequencies(RopeSpec("linear", 10000.0, 4, 8, factor=2.0)), torch.tensor([0.5, 0.005]))


def test_scores_depend_on_distance_only() -> None:
    rotary = Rotary(RopeSpec("default", 100.0, 8, 64), 64, torch.float32, CPU)
    query, key = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(at: int, of: int) -> float:
        turned = rotary(torch.tensor([at])).apply(query), rotary(torch.tensor([of])).apply(key)
        return float((turned[0] * turned[1]).sum())

    assert score(40, 33) == pytest.approx(score(7, 0), abs=1e-5)
    assert score(40, 33) != pytest.approx(score(40, 20), abs=1e-3)


def test_position_zero_is_left_alone() -> None:
    rotary = Rotary(RopeSpec("default", 100.0, 6, 4), 4, torch.float32, CPU)
    heads = torch.randn(1, 3, 8)
    assert torch.equal(rotary(torch.tensor([0])).apply(heads), heads)


def kinds() -> st.SearchStrategy[dict[str, Any]]:
    """Sections of every kind with plausible values."""
    factor = st.floats(1.0, 40.0)
    original = st.integers(8, 4096)
    return st.one_of(
        st.fixed_dictionaries({"rope_type": st.just("default")}),
        st.fixed_dictionaries({"rope_type": st.sampled_from(["linear", "dynamic"]), "factor": factor}),
        st.fixed_dictionaries(
            {
                "rope_type": st.just("llama3"),
                "factor": factor,
                "low_freq_factor": st.floats(0.5, 2.0),
                "high_freq_factor": st.floats(2.5, 8.0),
                "original_max_position_embeddings": original,
            }
        ),
        st.fixed_dictionaries(
            {"rope_type": st.just("yarn"), "factor": factor, "original_max_position_embeddings": original},
            optional={
                "beta_fast": st.floats(16.0, 64.0),
                "beta_slow": st.floats(0.5, 4.0),
                "attention_factor": st.floats(0.5, 2.0),
                "mscale": st.floats(0.5, 2.0),
                "mscale_all_dim": st.floats(0.5, 2.0),
                "truncate": st.booleans(),
            },
        ),
    )


@settings(max_examples=150, deadline=None)
@given(section=kinds(), theta=st.sampled_from([10.0, 10000.0, 5e5]), dim=st.sampled_from([4, 8, 64, 128]))
def test_tables_equal_transformers(section: dict[str, Any], theta: float, dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=HEADS * dim,
        num_attention_heads=HEADS,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": theta, **section},
    )
    spec = read_rope(ConfigFile(Path("config.json"), {"rope_parameters": {"rope_theta": theta, **section}}), dim, 512)
    positions = torch.tensor([0, 1, 2, 100, 511])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    rotation = Rotary(spec, 512, torch.float32, CPU)(positions)
    torch.testing.assert_close(rotation.cos[:, 0], cos[0, :, : dim // 2], rtol=0, atol=1e-6)
    torch.testing.assert_close(rotation.sin[:, 0], sin[0, :, : dim // 2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_once(dtype: torch.dtype) -> None:
    spec = RopeSpec("default", 10000.0, 8, 4096)
    wide, half = (Rotary(spec, 4096, kind, CPU) for kind in (torch.float32, dtype))
    assert torch.equal(half.cos, wide.cos.to(dtype))
