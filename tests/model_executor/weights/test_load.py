"""Loading: the right values in the right places, in bounded memory, with a true report."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_executor.errors import CheckpointBroken, ModelRefused, WeightsRefused
from model_executor.weights import load as load_module
from model_executor.weights.layer_plan import plan_layers
from model_executor.weights.load import load_weights
from tests.fixtures.bad import BAD, Bad
from tests.fixtures.llama import Shape, llama_config, parameter_shapes, random_weights, write_llama
from tests.fixtures.reference import Reference
from tests.model_executor.engine import SIX, Loaded, build, load, write_small

PROMPT = [1, 2, 63, 40, 5, 5, 9]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_values_and_places(tmp_path: Path) -> None:
    weights = random_weights(SIX, seed=3, std=0.15)
    found = dict(load(write_small(tmp_path, SIX), [4]).model.named_parameters())
    prefix = "model.layers.4."
    query, key, value = (weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
    np.testing.assert_array_equal(found["blocks.0.attention.qkv.weight"], np.concatenate([query, key, value]).T)
    gate, up = (weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    np.testing.assert_array_equal(found["blocks.0.mlp.gate_up.weight"], np.concatenate([gate, up]).T)
    np.testing.assert_array_equal(found["blocks.0.mlp.down.weight"], weights[f"{prefix}mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(found["embedding.weight"], weights[EMBEDDING])
    np.testing.assert_array_equal(found["head.weight"], weights[HEAD].T)
    np.testing.assert_array_equal(found["norm.weight"], weights["model.norm.weight"])


@pytest.mark.parametrize("shards", [1, 4, len(parameter_shapes(SIX))])
@pytest.mark.parametrize("buffer", [1, 1000, 2**20])
def test_shards_and_buffer_sizes_change_nothing(
    tmp_path: Path, shards: int, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(write_small(tmp_path / "single", SIX)).model.state_dict()
    monkeypatch.setattr(load_module, "BUFFER_BYTES", buffer)
    found = load(write_small(tmp_path / "sharded", SIX, shards=shards)).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_unneeded_shards_may_be_gone(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX, shards=len(parameter_shapes(SIX)))
    expected = load(folder, [0, 2, 5])
    for file in expected.report.shards_skipped:
        (folder / file).unlink()
    found = load(folder, [0, 2, 5])
    assert np.array_equal(found.logits(PROMPT), expected.logits(PROMPT))
    assert found.report.layer_map == [0, 2, 5]
    assert found.report.revision == expected.report.revision
    with pytest.raises(CheckpointBroken, match="No such file"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_dtype_casts(tmp_path: Path, stored: Any, dtype: torch.dtype) -> None:
    weights = random_weights(SIX, seed=3, std=0.15)
    folder = write_llama(tmp_path, llama_config(SIX, stored), weights, dtype=stored)
    loaded = load(folder, dtype=dtype)
    expected = torch.from_numpy(weights[HEAD]).to(getattr(torch, stored)).to(dtype).t()
    assert torch.equal(loaded.model.state_dict()["head.weight"], expected)
    record = next(record for record in loaded.report.tensors if record.name == "head.weight")
    assert (record.source_dtype, record.dtype) == (stored, str(dtype).removeprefix("torch."))
    assert record.nbytes == 64 * 32 * dtype.itemsize


def test_report(tmp_path: Path) -> None:
    report = load(write_small(tmp_path, SIX, shards=3), [0, 1]).report
    assert report.counts == {
        "loaded": 3 + 2 * 4, "fused": 2 * 2, "skipped_by_plan": 4 * 9, "missing": 0, "unexpected": 0,
    }  # fmt: skip
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in parameter_shapes(SIX).items()}
    skipped = {record.name for record in report.tensors if record.state == "skipped_by_plan"}
    loaded = sum(size for name, size in sizes.items() if name not in skipped)
    assert report.bytes_read == report.bytes_materialized == loaded
    assert report.seconds.keys() == {"plan", "read"}
    assert report.page_cache == 1.0
    fused = next(record for record in report.tensors if record.name == "blocks.1.mlp.gate_up.weight")
    assert fused.sources == ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"]


def test_progress(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX, shards=3)
    spec, model = build(folder)
    seen: list[tuple[str, int, int, str]] = []
    report = load_weights(model, spec, plan_layers(spec), folder, lambda *event: seen.append(event))
    loads = [event for event in seen if event[0] == "load"]
    assert seen[0] == ("plan", 1, 1, "steps")
    assert loads[0] == ("load", 0, report.bytes_read, "bytes")
    assert loads[-1] == ("load", report.bytes_read, report.bytes_read, "bytes")
    assert [event[1] for event in loads] == sorted(event[1] for event in loads)


def assert_parity(folder: Path) -> None:
    expected = Reference(folder).logits(PROMPT)
    assert np.abs(load(folder).logits(PROMPT) - expected).max() <= 1e-4


def head_record(loaded: Loaded) -> tuple[str, list[str], int]:
    """State, sources and bytes of the head."""
    record = next(record for record in loaded.report.tensors if record.name == "head.weight")
    return record.state, record.sources, record.nbytes


def test_tie_without_head(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX, tensors={HEAD: None}, tie_word_embeddings=True)
    assert_parity(folder)
    assert head_record(load(folder)) == ("tied", [EMBEDDING], 0)


def test_tie_with_equal_head(tmp_path: Path) -> None:
    table = random_weights(SIX, seed=3, std=0.15)[EMBEDDING]
    folder = write_small(tmp_path, SIX, tensors={HEAD: table}, tie_word_embeddings=True)
    assert_parity(folder)
    assert head_record(load(folder)) == ("tied", [EMBEDDING, HEAD], 0)


def test_tie_with_another_head(tmp_path: Path) -> None:
    """transformers does not tie what differs, whatever the config says."""
    folder = write_small(tmp_path, SIX, tie_word_embeddings=True)
    assert_parity(folder)
    assert head_record(load(folder)) == ("loaded", [HEAD], 64 * 32 * 4)


def test_tie_under_the_head_name(tmp_path: Path) -> None:
    assert_parity(write_small(tmp_path, SIX, tensors={EMBEDDING: None}, tie_word_embeddings=True))


@pytest.mark.parametrize("value", [False, ...], ids=str)
def test_untied(tmp_path: Path, value: object) -> None:
    folder = write_small(tmp_path, SIX, tie_word_embeddings=value)
    assert_parity(folder)
    assert head_record(load(folder)) == ("loaded", [HEAD], 64 * 32 * 4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    name = "model.layers.3.self_attn.o_proj.weight"
    weights = random_weights(SIX, seed=3, std=0.15)
    weights[name][7, 7] = value
    folder = write_llama(tmp_path, llama_config(SIX), weights)
    with pytest.raises(WeightsRefused, match=f"{name} holds values that are not finite in float32"):
        load(folder)
    load(folder, [0, 1])


def test_values_beyond_the_dtype(tmp_path: Path) -> None:
    weights = random_weights(SIX, seed=3, std=0.15)
    weights[HEAD][0, 0] = 1e6
    folder = write_llama(tmp_path, llama_config(SIX), weights)
    load(folder, dtype=torch.bfloat16)
    with pytest.raises(WeightsRefused, match=f"{HEAD} holds values that are not finite in float16"):
        load(folder, dtype=torch.float16)


def test_large_values_whose_sum_overflows(tmp_path: Path) -> None:
    weights = random_weights(SIX, seed=3, std=0.15)
    weights[HEAD][:] = 3e38
    load(write_llama(tmp_path, llama_config(SIX), weights))


def test_file_cut_after_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_small(tmp_path, SIX)
    path = folder / "model.safetensors"
    spec, model = build(folder)

    def cut(phase: str, *_: object) -> None:
        if phase == "plan":
            path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(CheckpointBroken, match="cut while it was read"):
        load_weights(model, spec, plan_layers(spec), folder, cut)


MEMORY = """
import resource, sys
from pathlib import Path
from tests.model_executor.engine import build, silent
from model_executor.weights.layer_plan import plan_layers
from model_executor.weights.load import load_weights
folder = Path(sys.argv[1])
spec, model = build(folder)
for parameter in model.parameters():
    parameter.data.zero_()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_weights(model, spec, plan_layers(spec), folder, silent)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_bounded_memory(tmp_path: Path) -> None:
    """A table of 96 MiB comes in through a buffer of 16 MiB and its cast."""
    shape = Shape(hidden=64, layers=1, vocab=3 * 2**18, tied=True)
    weights = random_weights(Shape(hidden=64, layers=1, vocab=1, tied=True), seed=0, std=0.1)
    weights[EMBEDDING] = np.zeros((shape.vocab, shape.hidden), dtype=np.float32)
    folder = write_llama(tmp_path, llama_config(shape, "bfloat16"), weights, dtype="bfloat16")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder)], check=True, capture_output=True, text=True, timeout=120
    )
    assert int(done.stdout) < 3 * load_module.BUFFER_BYTES


def test_descriptors_are_closed(tmp_path: Path) -> None:
    folder = write_small(tmp_path, SIX, shards=4)
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    load(folder)
    assert len(list(open_files.iterdir())) == before


@pytest.mark.parametrize("bad", [bad for bad in BAD if "tokenizer" not in bad.name], ids=lambda bad: bad.name)
def test_broken_folders_are_refused_by_name(tmp_path: Path, rand_folder: Path, bad: Bad) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(rand_folder, folder)
    bad.apply(folder)
    with pytest.raises(ModelRefused) as caught:
        load(folder)
    assert all(name in str(caught.value) for name in (str(folder), *bad.names))
