"""Model folders that want out of themselves, want to be run, or want to be read for ever: refused, by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine_core.wire.config import ModelOptions
from frontend.errors import ModelFolderError, StartError
from frontend.model_folder import INDEX_FILE, ModelFolder
from model_executor.errors import CheckpointBroken, UnknownArchitecture
from model_executor.models.reader import read_spec
from model_executor.weights.index import Checkpoint
from tests.fakes.core_process import ROOT
from tests.fixtures.bad import set_config

WEIGHTS = "model.safetensors"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def folder(chain_folder: Path, tmp_path: Path) -> Path:
    """A good folder of the test's own."""
    return Path(shutil.copytree(chain_folder, tmp_path / "model"))


def shard(folder: Path, name: str, target: Path | None = None) -> Path:
    """Move the weights to a shard that the index calls `name`, and give where they lie."""
    checkpoint = Checkpoint.open(folder)
    index = {"metadata": {}, "weight_map": dict.fromkeys(checkpoint.files, name)}
    place = target or folder / SHARD
    (folder / WEIGHTS).rename(place)
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    return place


def refused(folder: Path, *words: str) -> None:
    """Both processes refuse it, and name the culprit."""
    with pytest.raises(ModelFolderError) as told:
        ModelFolder.open(folder)
    for word in words:
        assert word in str(told.value)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "./x.safetensors",
    ],
)
def test_an_index_that_names_files_elsewhere(folder: Path, name: str) -> None:
    shard(folder, name)
    shutil.copy(folder / SHARD, folder.parent / "x.safetensors")
    (folder / "sub").mkdir()
    shutil.copy(folder / SHARD, folder / "sub" / "x.safetensors")
    refused(folder, INDEX_FILE, "weight_map")
    with pytest.raises(CheckpointBroken, match="weight_map"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["x\x00.safetensors", "x.safetensors\x00", "x.bin", 5, None, ["x.safetensors"]])
def test_an_index_that_names_no_safetensors_file(folder: Path, name: Any) -> None:
    shard(folder, name)
    refused(folder)
    with pytest.raises(CheckpointBroken):
        Checkpoint.open(folder)


def test_shards_may_be_links_as_hub_caches_make_them(folder: Path, tmp_path: Path) -> None:
    blob = shard(folder, SHARD, tmp_path / "blob")
    (folder / SHARD).symlink_to(os.path.relpath(blob, folder))
    ModelFolder.open(folder)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.entries(checkpoint.files)


def test_a_link_to_nothing(folder: Path) -> None:
    shard(folder, SHARD)
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to("nowhere")
    refused(folder, SHARD, "is missing")


@pytest.mark.parametrize(
    "name", [WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize("kind", ["pipe", "zeros", "folder"])
def test_files_that_cannot_be_read_to_an_end(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    began = time.monotonic()
    refused(folder, name, "is no regular file")
    assert time.monotonic() - began < 2.0
    if name == WEIGHTS:
        with pytest.raises(CheckpointBroken, match="no regular file"):
            Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickled_weights_alone(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    refused(folder, name, "pickled weights are never read")
    with pytest.raises(CheckpointBroken):
        Checkpoint.open(folder)


def test_pickled_weights_beside_safetensors_are_not_looked_at(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04garbage")
    ModelFolder.open(folder)
    assert Checkpoint.open(folder).shards == [WEIGHTS]


def test_code_of_its_own_is_never_run(folder: Path) -> None:
    set_config(folder, auto_map={"AutoConfig": "modeling_x.Y", "AutoModelForCausalLM": "modeling_x.X"})
    (folder / "modeling_x.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    ModelFolder.open(folder)
    assert read_spec(folder, ModelOptions()).architecture == "LlamaForCausalLM"
    set_config(folder, architectures=["ParrotForCausalLM"], model_type="parrot")
    with pytest.raises(UnknownArchitecture, match="ParrotForCausalLM"):
        read_spec(folder, ModelOptions())


def test_a_tokenizer_with_code_of_its_own(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    auto = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(auto), encoding="utf-8")
    refused(folder, "tokenizer_config.json", "auto_map")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json", INDEX_FILE])
def test_json_nested_without_end(folder: Path, name: str) -> None:
    if name == INDEX_FILE:
        shard(folder, SHARD)
    (folder / name).write_text('{"a":' * 200_000, encoding="utf-8")
    refused(folder, name)


ENDLESS = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "growth": "{% set ns = namespace(s='ab') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "constant": "{{ 'ab' * 999999999 }}",
    "power": "{{ 9 ** 999999999 }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "escape": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '../config.json' as x %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_without_end_are_refused_at_the_start_or_at_the_request(folder: Path, name: str) -> None:
    (folder / "chat_template.jinja").write_text(ENDLESS[name], encoding="utf-8")
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from frontend.api.texts import Texts\n"
        "from frontend.errors import RequestError, StartError\n"
        "from frontend.model_folder import ModelFolder\n"
        "from frontend.tokenizer.load import load_tokenizer\n"
        "async def main():\n"
        "    texts = Texts.of(ModelFolder.open(Path(sys.argv[1])), load_tokenizer(Path(sys.argv[1])))\n"
        "    await texts.chat([{'role': 'user', 'content': 'hi'}], add_generation_prompt=True,\n"
        "        continue_final_message=False, variables={}, room=1000)\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except (StartError, RequestError) as error:\n"
        "    print('refused:', str(error)[:200])\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:"), done.stdout
    assert time.monotonic() - began < 20.0


def test_refusals_are_errors_of_the_start() -> None:
    assert issubclass(ModelFolderError, StartError)
