"""`tercet serve --layers`: a part of a checkpoint, and the same part cut out, are served alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_core.wire.sampling import SamplingParams
from frontend.client import Client
from model_executor.tools.model import open_model
from model_executor.tools.plan import Shards, make_report
from tests.e2e.server import Server
from tests.fixtures.llama import write_rand
from tests.fixtures.reference import Reference, prompts
from tests.model_executor.tools.folders import KEPT, cut, spread, write_model

COUNT = 12
PROMPTS = prompts(4, vocab=90, seed=5, shortest=6, longest=30)
FLAGS = ("--num-kv-blocks", "256", "--served-model-name", "m")
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


def answers(server: Server) -> list[list[int]]:
    """Greedy tokens for every prompt, by token ids over the Python client."""
    with Client(server.socket) as client:
        return [[token for output in client.submit(prompt, GREEDY) for token in output.token_ids] for prompt in PROMPTS]


def report(server: Server, name: str) -> Any:
    """One of the server's reports."""
    return httpx.get(f"{server.url}/reports/{name}", timeout=10).json()


def planned(folder: Path, layers: str) -> Shards:
    """What `tercet plan` says of the weight files."""
    made = make_report(open_model(folder), layers, allow_missing_classes=False)
    assert made.shards is not None
    return made.shards


SERVED = [
    "gemma3",
    "deepseek-v3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gemma3_text")),
]


@pytest.mark.parametrize("name", SERVED)
def test_a_part_and_its_cut_are_served_alike(tmp_path: Path, name: str) -> None:
    layers = ",".join(map(str, KEPT[name]))
    source = spread(write_model(tmp_path / "source", name))
    shards = planned(source, layers)
    out = cut(source, tmp_path / "out", [int(layer) for layer in layers.split(",")])
    for file in shards.not_needed:
        (source / file).unlink()
    assert shards.not_needed
    reports = tmp_path / "reports"
    with Server(source, *FLAGS, "--layers", layers, "--report-dir", str(reports)) as server:
        part = answers(server.wait_ready())
        load = report(server, "load")
        assert f"block 1 <- source block {layers.split(',')[1]}" in server.log()
    assert load["layer_map"] == [int(layer) for layer in layers.split(",")]
    assert load["bytes_read"] == shards.bytes_to_read
    assert load["shards_opened"] == list(shards.needed)
    assert json.loads((reports / "load.json").read_text()) == load
    assert json.loads((reports / "startup.json").read_text())["layer_map"] == load["layer_map"]
    with Server(out, *FLAGS) as server:
        whole = answers(server.wait_ready())
        assert report(server, "load")["bytes_materialized"] == load["bytes_materialized"]
    reference = Reference(out)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    assert all(continuation.clear() for continuation in expected)
    assert part == whole == [list(continuation.token_ids) for continuation in expected]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--layers", "0,9"), "layers: 0,9: block 9 is outside 0 .. 5"),
        (("--layers", "first:2"), "no block of mla-full"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused_by_name(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    source = write_model(tmp_path / "source", "deepseek-v3")
    with Server(source, *FLAGS, *flags) as server:
        assert server.wait_end() == 3
        assert message in server.log().splitlines()[-1]


def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    source = write_rand(tmp_path / "source")
    path = source / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-4:] = b"\x00\x00\xc0\x7f"
    path.write_bytes(raw)
    with Server(source, *FLAGS) as server:
        assert server.wait_end() == 3
        assert "lm_head.weight holds values that are not finite" in server.log().splitlines()[-1]


def test_a_report_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Server(write_rand(tmp_path / "source"), *FLAGS, "--report-dir", str(tmp_path / "file" / "x")) as server:
        assert server.wait_end() == 2
        assert "--report-dir" in server.log().splitlines()[-1]
