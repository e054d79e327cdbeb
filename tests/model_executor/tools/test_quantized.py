"""Plan and cut of quantized checkpoints: names and bytes, as they lie."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_core.wire.config import ModelOptions
from model_executor.errors import ConfigRefused
from model_executor.models.config import ConfigFile
from model_executor.models.reader import read_spec
from model_executor.models.registry import find_family
from model_executor.tools.cut import main
from model_executor.tools.model import open_model
from model_executor.tools.plan import lines, make_report
from tests.fixtures import families
from tests.fixtures.llama import random_weights
from tests.fixtures.safetensors_file import write_checkpoint
from tests.fixtures.vision import write_conditional
from tests.model_executor.engine import SIX, write_small
from tests.model_executor.tools.folders import cut, fields, record, tensors


def write_quantized(folder: Path) -> Path:
    """A checkpoint whose maps have scales beside them, and one layer that is left as it is."""
    drawn: dict[str, Any] = random_weights(SIX, seed=3, std=0.15)
    scales = {
        f"{name}_scale": np.ones(1, np.float32) for name in drawn if "proj" in name and "layers.5.mlp.gate" not in name
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head", "model.layers.5.mlp.gate_proj", "re:.*self_attn.*"],
    }
    write_small(folder, SIX, quantization_config=quantization)
    write_checkpoint(folder, {**drawn, **scales})
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"exclude_modules": ["lm_head", "model.layers.5.mlp.gate_proj"]}})
    )
    return folder


def test_quantized_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_quantized(tmp_path / "source")
    first, picked = cut(source, tmp_path / "first", [0, 1, 2]), cut(source, tmp_path / "picked", [0, 5])
    assert fields(first)["quantization_config"]["ignore"] == ["lm_head", "re:.*self_attn.*"]
    moved = ["lm_head", "model.layers.1.mlp.gate_proj", "re:.*self_attn.*"]
    assert fields(picked)["quantization_config"]["ignore"] == moved
    side = json.loads((picked / "hf_quant_config.json").read_text())
    assert side == {"quantization": {"exclude_modules": ["lm_head", "model.layers.1.mlp.gate_proj"]}}
    names = [edit["field"] for edit in record(picked)["edits"]]
    assert names == [
        *("num_hidden_layers", "quantization_config.ignore"),
        "hf_quant_config.json.quantization.exclude_modules",
    ]
    before, after = tensors(source), tensors(picked)
    for part in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.up_proj.weight_scale"):
        assert after[f"model.layers.1.{part}"] == before[f"model.layers.5.{part}"]
    assert "model.layers.1.mlp.gate_proj.weight_scale" not in after
    config = ConfigFile.read(picked / "config.json")
    with pytest.raises(ConfigRefused, match="quantization_config"):
        find_family(config).read(config)
    families.edit_config(source, quantization_config={"ignore": [r"re:model\.layers\.5\..*"]})
    assert main([str(source), str(tmp_path / "no"), "--layers", "0,5"]) == 3
    assert "would treat model.layers.1." in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def write_eight_bits(folder: Path) -> Path:
    """A checkpoint whose maps are in 8 bits with a scale for each block of numbers, as DeepSeek V3 is published."""
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
    }
    write_small(folder, SIX, quantization_config=quantization, torch_dtype="float32")
    drawn = load_file(folder / "model.safetensors")
    for name in [name for name in drawn if "proj" in name]:
        drawn[f"{name}_scale_inv"] = torch.rand(*(-(-size // 16) for size in drawn[name].shape))
        drawn[name] = drawn[name].to(torch.float8_e4m3fn)
    save_file(drawn, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_weights_in_eight_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan and cut take them as they lie; the server refuses them by the field that says so."""
    source = write_eight_bits(tmp_path / "source")
    out = cut(source, tmp_path / "out", [0, 5])
    before, after = tensors(source), tensors(out)
    for part in ("weight", "weight_scale_inv"):
        assert after[f"model.layers.1.mlp.up_proj.{part}"] == before[f"model.layers.5.mlp.up_proj.{part}"]
    assert fields(out)["quantization_config"] == fields(source)["quantization_config"]
    made = make_report(open_model(source), "0,5", allow_missing_classes=False)
    assert made.quantization == "quantization_config: fp8 in blocks of 16 x 16"
    assert made.shards is not None
    assert made.shards.bytes_to_read == sum(map(len, after.values())) == sum(made.shards.stored.values())
    assert made.shards.stored["F8_E4M3"] * 4 + sum(map(len, plain(after))) == made.memory_bytes["float32"]
    assert f"weights quantized by {made.quantization} are not supported, tercet serve refuses" in "\n".join(lines(made))
    for folder in (source, out):
        with pytest.raises(ConfigRefused, match=r"quantization_config: .*'quant_method': 'fp8'.*are not served"):
            read_spec(folder, ModelOptions())


@pytest.mark.parametrize("block", [[16, 16], [0, 0]])
def test_scales_that_no_rule_explains(tmp_path: Path, block: list[int]) -> None:
    """Of a norm, or of blocks of no numbers: the files are away, and nobody knows their size."""
    source = write_eight_bits(tmp_path / "source")
    families.edit_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": block})
    names = [*tensors(source), "model.norm.weight_scale_inv"]
    (source / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    made = make_report(open_model(source), "full", allow_missing_classes=False)
    assert made.shards is not None
    assert made.shards.bytes_to_read is None


def plain(found: Mapping[str, bytes]) -> list[bytes]:
    """The tensors that are neither in 8 bits nor scales."""
    return [values for name, values in found.items() if "proj" not in name]


def test_layers_of_another_part_are_no_blocks(tmp_path: Path) -> None:
    source = write_conditional(tmp_path / "source")
    apart = ["vision_tower.encoder.layers.1.mlp.fc1", "model.vision_tower.encoder.layers.0"]
    ignore = [*apart, "language_model.model.layers.5.mlp.up_proj", "language_model.model.layers.1.mlp.up_proj"]
    families.edit_config(source, quantization_config={"quant_method": "compressed-tensors", "ignore": ignore})
    made = fields(cut(source, tmp_path / "out", [0, 5]))
    assert made["quantization_config"]["ignore"] == [*apart, "language_model.model.layers.1.mlp.up_proj"]
    assert made["text_config"]["num_hidden_layers"] == 2
    assert [edit["field"] for edit in record(tmp_path / "out")["edits"]][-1] == "quantization_config.ignore"
