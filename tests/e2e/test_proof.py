"""Coverage, sentinel and report on small models, with the real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from frontend.errors import StartRefused, UsageError
from frontend.proof.own_server import OwnServer
from tests.e2e.server import ROOT
from tests.fixtures.families import edit_config
from tests.fixtures.llama import Shape, write_rand
from tests.model_executor.tools.folders import write_model

DEADLINE_S = 600


def tercet(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frontend", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe") / "model", "qwen3-moe")


def flipped(folder: Path, copy: Path, name: str) -> Path:
    """A copy of the folder in which the lowest bit of one float32 weight differs, and nothing else."""
    shutil.copytree(folder, copy)
    path = copy / "model.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    raw[8 + length + header[name]["data_offsets"][0] + 4 * 5] ^= 1
    path.write_bytes(raw)
    return copy


def test_coverage_of_two_classes(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "coverage.json"
    done = tercet("coverage", folder, "--layers", "0,1", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "verdict: pass"
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert report["not_run"] == []
    assert len({row["layer_class"] for row in report["rows"]}) == 3
    for row in report["rows"]:
        assert all(cell["eager"] + cell["graph"] > 0 for cell in row["cells"]), row
    kernels = {kernel for row in report["rows"] for kernel in row["kernels"]}
    assert kernels == {choice["chosen"] for choice in report["kernels"]}
    assert report["exit_status"] == 0
    assert report["chunked"] > 0


def test_a_sentinel_catches_one_bit(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "sentinel.json"
    layers: Sequence[str] = ("--layers", "0,1")
    recorded = tercet("sentinel", "record", file, folder, *layers)
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    again = tercet("sentinel", "check", file, folder, *layers)
    assert again.returncode == 0, again.stdout + again.stderr
    name = "model.layers.1.self_attn.o_proj.weight"
    spoilt = flipped(folder, tmp_path / "spoilt", name)
    caught = tercet("sentinel", "check", file, spoilt, *layers)
    assert caught.returncode == 1, caught.stdout + caught.stderr
    assert f"(from {name}): other bytes" in caught.stdout
    assert caught.stdout.splitlines()[-1] == "verdict: fail"


@pytest.mark.slow
def test_a_sentinel_of_other_blocks_is_not_compared(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "sentinel.json"
    recorded = tercet("sentinel", "record", file, folder, "--layers", "0,1")
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    other = tercet("sentinel", "check", file, folder, "--layers", "0,5")
    assert other.returncode == 2
    assert "another plan and is not compared: layer_map [0, 1], now [0, 5]" in other.stderr


@pytest.mark.slow
def test_a_sentinel_of_products_in_int8(tmp_path: Path) -> None:
    """The server's native kernels against torch's."""
    model, file = write_rand(tmp_path / "model", shape=Shape(hidden=64, layers=2, intermediate=64)), tmp_path / "s.json"
    int8 = ("--quantization", "int8")
    recorded = tercet("sentinel", "record", file, model, *int8)
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    assert "in float32 with products in int8" in recorded.stdout
    again = tercet("sentinel", "check", file, model, *int8)
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.slow
def test_a_sentinel_of_other_products_is_not_compared(tmp_path: Path) -> None:
    model, file = write_rand(tmp_path / "model", shape=Shape(hidden=64, layers=2, intermediate=64)), tmp_path / "s.json"
    recorded = tercet("sentinel", "record", file, model, "--quantization", "int8")
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    plain = tercet("sentinel", "check", file, model)
    assert plain.returncode == 2
    assert "is not compared: kv_cache_dtype float16, now float32; quantization int8, now none" in plain.stderr


def test_a_server_of_ones_own_ends_with_its_object(folder: Path) -> None:
    with OwnServer(folder, ["--layers", "0,1"]) as server:
        server.wait_ready()
        processes = psutil.Process().children(recursive=True)
        assert len(processes) >= 3
        assert server.url.startswith("http://127.0.0.1:")
        assert server.stop() == 0
        assert server.stop() == 0
        assert not any(process.is_running() for process in processes)
    assert not server.socket.parent.exists()


def test_a_server_that_does_not_start_says_why(folder: Path) -> None:
    with (
        OwnServer(folder, ["--layers", "99"]) as server,
        pytest.raises(StartRefused, match="serve: layers: 99"),
    ):
        server.wait_ready()
    with OwnServer(folder, ["--dtype", "x"]) as server, pytest.raises(UsageError, match="--dtype"):
        server.wait_ready()


def test_what_the_server_refuses_ends_a_proof_with_its_exit_code(folder: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "model"
    shutil.copytree(folder, quantized)
    edit_config(quantized, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    done = tercet("coverage", quantized, "--layers", "0,1")
    assert done.returncode == 3
    assert done.stderr.startswith("error: tercet serve: ")
    assert "quantization_config" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_report_on_some_blocks(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tercet("report", folder, "--layers", "0,1,5", "--samples", "3", "--out", out)
    text = (out / "report.md").read_text(encoding="utf-8")
    assert done.returncode == 0, text
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["failures"] == []
    assert [check["passed"] for check in report["checks"]] == [True] * 7
    assert {part["name"] for part in report["parts"]} == {"plan", "coverage", "probe", "parity", "sentinel", "bench"}
    assert report["blocks"] == "3 of 6 blocks"
    assert all(row["speed"] is None for row in report["findings"]["bench"])
    assert "tokens/s" not in text
    assert "tercet parity" in text


@pytest.mark.slow
def test_a_report_with_products_in_int8(tmp_path: Path) -> None:
    """Every proof runs with the flags, and says so."""
    model, out = write_rand(tmp_path / "m", shape=Shape(hidden=64, layers=2, intermediate=64)), tmp_path / "out"
    done = tercet("report", model, "--quantization", "int8", "--kv-cache-dtype", "bfloat16", "--out", out)
    text = (out / "report.md").read_text(encoding="utf-8")
    assert done.returncode == 0, text
    found = json.loads((out / "report.json").read_text(encoding="utf-8"))["findings"]
    assert {"quantization": "int8", "kv_cache_dtype": "bfloat16"}.items() <= found["sentinel"]["identity"].items()
    assert found["sentinel"]["identity"] == found["parity"]["identity"] == found["probe"]["identity"]
    products = [each for each in found["coverage"]["kernels"] if each["problem"].endswith("in int8")]
    assert products
    assert all(f"| linear | {each['problem']} | {each['chosen']} |" in text for each in products)
    assert text.count("float32 with products in int8, keys and values in bfloat16") == 2


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("layers", ["first:1", "0,7,29"])
def test_a_report_on_the_default_model(default_model: Path, tmp_path: Path, layers: str) -> None:
    done = tercet("report", default_model, "--layers", layers, "--samples", "4", "--out", tmp_path)
    assert done.returncode == 0, (tmp_path / "report.md").read_text(encoding="utf-8")
