"""A model folder as the tools read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_executor.errors import CheckpointBroken, ConfigRefused, LayersRefused, UnknownArchitecture
from model_executor.tools.model import open_model
from tests.model_executor.engine import SIX, write_small


def test_quantization_is_left_aside(tmp_path: Path) -> None:
    model = open_model(write_small(tmp_path, SIX, quantization_config={"quant_method": "fp8"}))
    assert model.quantization == "quantization_config: fp8"
    assert len(model.spec.layers) == 6
    plain = write_small(tmp_path / "plain", SIX)
    assert open_model(plain).quantization is None
    (plain / "hf_quant_config.json").write_text("{}")
    assert open_model(plain).quantization == "hf_quant_config.json"


def test_what_the_server_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointBroken, match="no such folder"):
        open_model(tmp_path / "gone")
    with pytest.raises(UnknownArchitecture):
        open_model(write_small(tmp_path / "a", SIX, architectures=["OtherForCausalLM"]))
    with pytest.raises(ConfigRefused, match="hidden_size"):
        open_model(write_small(tmp_path / "b", SIX, hidden_size=0))
    with pytest.raises(LayersRefused, match="block 6"):
        open_model(write_small(tmp_path / "c", SIX)).plan("6", allow_missing_classes=False)


def test_files_may_end_after_their_header_where_only_headers_are_read(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX)
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(CheckpointBroken, match="cut"):
        open_model(folder)
    model = open_model(folder, cut=True)
    assert model.checkpoint is not None
    assert model.checkpoint.is_cut("model.safetensors")
    path.write_bytes(raw)
    whole = open_model(folder, cut=True).checkpoint
    assert whole is not None
    assert not whole.is_cut("model.safetensors")
    path.write_bytes(raw + b"x")
    with pytest.raises(CheckpointBroken, match="1 bytes behind the last tensor"):
        open_model(folder, cut=True)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX)
    (folder / "model.safetensors").unlink()
    assert open_model(folder).checkpoint is None
