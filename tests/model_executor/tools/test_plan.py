"""`tercet plan`: what a choice needs, from configuration, index and headers, in seconds and megabytes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_core.wire.config import ModelOptions
from model_executor.errors import ConfigRefused
from model_executor.models.reader import read_spec
from model_executor.tools.model import open_model
from model_executor.tools.plan import lines, main, make_report
from model_executor.tools.table import megabytes
from model_executor.weights.layer_plan import plan_layers
from tests.fixtures.families import edit_config, write_family
from tests.fixtures.llama import Shape, parameter_shapes
from tests.fixtures.vision import write_conditional
from tests.model_executor.engine import SIX, load, write_small
from tests.model_executor.tools.folders import write_model
from tests.model_executor.tools.giants import QWEN, V3, Tensor, qwen_tensors, v3_tensors, write_headers

ONE_TENSOR_A_SHARD = len(parameter_shapes(SIX))


def report(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What `tercet plan --json` prints."""
    assert main([*map(str, words), "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


@pytest.mark.parametrize("sources", [(0,), (0, 3, 5), (0, 1, 2, 3, 4, 5)], ids=str)
def test_what_is_planned_is_what_is_loaded(
    tmp_path: Path, sources: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_small(tmp_path, SIX, shards=ONE_TENSOR_A_SHARD)
    plan = report(capsys, folder, "--layers", ",".join(map(str, sources)))
    loaded = load(folder, sources)
    assert plan["layer_map"] == loaded.report.layer_map
    assert plan["shards"]["needed"] == loaded.report.shards_opened
    assert plan["shards"]["not_needed"] == loaded.report.shards_skipped
    assert plan["shards"]["bytes_to_read"] == loaded.report.bytes_read
    assert plan["shards"]["absent"] == []
    assert plan["memory_bytes"]["float32"] == loaded.report.bytes_materialized
    assert plan["memory_bytes"]["bfloat16"] * 2 == loaded.report.bytes_materialized
    assert plan["kv_bytes_per_token"]["float32"] == len(sources) * 2 * 2 * 8 * 4
    assert plan["revision"] == loaded.report.revision
    assert not plan["shards"]["estimated"]


def test_files_that_are_not_needed_may_be_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_small(tmp_path, SIX, shards=ONE_TENSOR_A_SHARD)
    whole = report(capsys, folder, "--layers", "0,3")
    for file in whole["shards"]["not_needed"]:
        (folder / file).unlink()
    assert report(capsys, folder, "--layers", "0,3") == whole
    assert np.isfinite(load(folder, (0, 3)).logits([1, 2, 3])).all()


def test_files_that_are_needed_may_be_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes then follow from the structure."""
    folder = write_small(tmp_path, SIX, shards=ONE_TENSOR_A_SHARD)
    whole = report(capsys, folder, "--layers", "0,3")
    absent = whole["shards"]["needed"][2:5]
    for file in absent:
        (folder / file).unlink()
    part = report(capsys, folder, "--layers", "0,3")
    stored = part["shards"].pop("stored")
    assert 0 < stored["F32"] < whole["shards"].pop("stored")["F32"]
    assert part["shards"] == {**whole["shards"], "absent": absent, "estimated": True}


def test_a_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_small(tmp_path, SIX)
    (folder / "model.safetensors").unlink()
    made = report(capsys, folder)
    assert made["shards"] is None
    assert made["revision"] is None
    assert main([str(folder)]) == 0
    assert "no weights here" in capsys.readouterr().out


def test_what_the_server_would_refuse_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_small(tmp_path, SIX, tensors={"model.layers.3.mlp.extra.weight": np.ones(4, np.float32)})
    assert main([str(folder), "--layers", "0,3"]) == 3
    assert "unexpected: model.layers.3.mlp.extra.weight" in capsys.readouterr().err
    assert main([str(folder), "--layers", "0,9"]) == 3
    assert "block 9 is outside 0 .. 5" in capsys.readouterr().err
    assert main([str(tmp_path / "gone")]) == 3
    assert "no such folder" in capsys.readouterr().err


def test_the_text_holds_it_all(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX, shards=ONE_TENSOR_A_SHARD)
    made = make_report(open_model(folder), "0,3", allow_missing_classes=False)
    text = "\n".join(lines(made))
    for word in (made.classes[0].name, "0-5", "0,3", *made.shards.needed, "prefill", "decode", "mixed", "kv_append"):  # type: ignore[union-attr]
        assert word in text


# Name, configuration, tensors, bytes of the choice that `cover` makes, the choice, numbers kept of a token.
GIANTS = [
    pytest.param(V3, v3_tensors, (0, 3), 512 + 64, 650e9, id="deepseek-v3"),
    pytest.param(QWEN, qwen_tensors, (0,), 2 * 4 * 128, 400e9, id="qwen3-235b"),
]


@pytest.mark.parametrize(("config", "tensors", "cover", "kept", "least"), GIANTS)
def test_models_of_hundreds_of_gigabytes(
    tmp_path: Path, config: dict[str, Any], tensors: Any, cover: tuple[int, ...], kept: int, least: float
) -> None:
    folder = tmp_path / "model"
    assert write_headers(folder, config, tensors()) > least
    code = (
        "import pathlib, sys; from model_executor.tools.plan import main; status = main();"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules;"
        "text = pathlib.Path('/proc/self/status').read_text();"
        "print(text.split('VmHWM:')[1].split()[0], file=sys.stderr); sys.exit(status)"
    )
    began = time.monotonic()
    command = [sys.executable, "-c", code, str(folder), "--layers", "cover", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert time.monotonic() - began < 30
    assert int(done.stderr) < 250_000  # kilobytes
    made = json.loads(done.stdout)
    assert tuple(made["layer_map"]) == cover
    assert made["kv_bytes_per_token"]["bfloat16"] == len(cover) * kept * 2
    chosen = [tensor for tensor in tensors() if _of(tensor, cover)]
    sizes = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    assert made["shards"]["bytes_to_read"] == sum(sizes[dtype] * int(np.prod(shape)) for _, dtype, shape in chosen)
    quantized = "quantization_config: fp8 in blocks of 128 x 128"
    assert made["quantization"] == (quantized if "quantization_config" in config else None)
    assert sum(made["shards"]["stored"].values()) == made["shards"]["bytes_to_read"]
    assert set(made["shards"]["absent"]) == set(made["shards"]["needed"])
    assert len(made["shards"]["not_needed"]) > 90


def _of(tensor: Tensor, cover: tuple[int, ...]) -> bool:
    words = tensor[0].split(".")
    return words[1] != "layers" or int(words[2]) in cover


@pytest.mark.parametrize(
    ("config", "tensors", "layers"),
    [(QWEN, qwen_tensors, "3,93"), (V3, v3_tensors, "2,60")],
    ids=["qwen3-235b", "deepseek-v3"],
)
def test_an_index_alone_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], tensors: Any, layers: str
) -> None:
    """Also for weights in 8 bits: the index tells which they are."""
    folder = tmp_path / "model"
    write_headers(folder, config, tensors())
    with_headers = report(capsys, folder, "--layers", layers)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    alone = report(capsys, folder, "--layers", layers)
    assert alone["shards"] == {**with_headers["shards"], "estimated": True, "stored": {}}


def test_a_published_configuration_alone_is_not_said_to_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code is not needed, its weights are not supported: no plan without saying so."""
    (tmp_path / "config.json").write_text(json.dumps(V3))
    text = plan_text(capsys, tmp_path)
    assert "fp8 in blocks of 128 x 128 are not supported, tercet serve refuses the folder" in text
    assert "dummy" not in text
    with pytest.raises(ConfigRefused, match=r"quantization_config: .*fp8"):
        read_spec(tmp_path, ModelOptions(load_format="dummy"))
    plain = {name: value for name, value in V3.items() if name != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert "the folder serves --load-format dummy alone" in plan_text(capsys, tmp_path)
    assert read_spec(tmp_path, ModelOptions()).architecture == "DeepseekV3ForCausalLM"


def test_of_an_unknown_quantization_nothing_is_reckoned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    write_headers(folder, {**QWEN, "quantization_config": {"quant_method": "gptq"}}, qwen_tensors())
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert report(capsys, folder, "--layers", "3")["shards"]["bytes_to_read"] is None
    assert "bytes to read: unknown until the files are there" in plan_text(capsys, folder)


def test_windows_are_kv_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_family(tmp_path, "gemma3_text")
    made = report(capsys, folder)
    token = 2 * 2 * 16 * 4
    assert [(each["window"], each["layers"]) for each in made["kv_groups"]] == [(None, 2), (5, 4)]
    assert [each["bytes_per_token"]["float32"] for each in made["kv_groups"]] == [2 * token, 4 * token]
    assert made["kv_bytes_per_token"]["float32"] == 6 * token
    text = plan_text(capsys, folder)
    assert f"4 blocks that keep the last 5 tokens and what a step adds: 1.0 kB ({4 * token} bytes) in float32" in text
    # A window that no sequence outgrows is none.
    edit_config(folder, sliding_window=128)
    assert [(each["window"], each["layers"]) for each in report(capsys, folder)["kv_groups"]] == [(None, 6)]


def test_a_part_for_images_is_never_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_conditional(tmp_path)
    made = report(capsys, folder)
    (reason, count), *others = made["shards"]["ignored"].items()
    assert not others
    assert (reason, count > 30) == ("the part for images; text alone is served", True)
    assert f"never read: {count} tensors: {reason}" in plan_text(capsys, folder)


def plan_text(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """What `tercet plan` prints for people."""
    assert main([str(folder)]) == 0
    return capsys.readouterr().out


def test_memory_by_device_and_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_small(tmp_path, Shape(hidden=64, layers=2, intermediate=64))
    plain = report(capsys, folder)
    narrow = report(capsys, folder, "--quantization", "int8")
    assert (plain["products"], narrow["products"]) == ("none", "int8")
    assert narrow["cpu_bytes"]["float32"] < plain["cpu_bytes"]["float32"]
    assert f"weights on the CPU: {megabytes(plain['cpu_bytes']['float32'])} in float32" in plan_text(capsys, folder)
    assert main([str(folder), "--quantization", "int8"]) == 0
    text = capsys.readouterr().out
    assert f"weights on the CPU, products in int8: {megabytes(narrow['cpu_bytes']['float32'])} in float32" in text
    assert "CUDA" not in text
    assert main([str(write_small(tmp_path / "odd", SIX)), "--quantization", "int8"]) == 3
    assert "inputs 32: multiples of 64" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_memory_is_what_the_parameters_take(tmp_path: Path, name: str) -> None:
    """Also of a router that is kept in float32 whatever the dtype."""
    folder = write_model(tmp_path, name)
    made = make_report(open_model(folder), "full", allow_missing_classes=False)
    assert made.layer_map == plan_layers(read_spec(folder, ModelOptions())).sources
    for dtype in (torch.float32, torch.bfloat16):
        taken = load(folder, dtype=dtype).report.bytes_materialized
        assert made.memory_bytes[str(dtype).removeprefix("torch.")] == taken  # type: ignore[index]
