"""The plain execution of a pack: repeatable to the bit, with a digest of every weight."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine_core.wire.evidence import ReferenceRun
from model_executor.tools import reference
from tests.model_executor.tools.folders import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("deepseek") / "model", "deepseek-v3")


def run(folder: Path, path: Path, *flags: str) -> ReferenceRun:
    assert reference.main([str(folder), "--json", str(path), *flags]) == 0
    return msgspec.json.decode(path.read_bytes(), type=ReferenceRun)


def test_two_runs_are_equal_to_the_bit(folder: Path, tmp_path: Path) -> None:
    first = run(folder, tmp_path / "a", "--layers", "1,4", "--sample-vocab", "50")
    assert run(folder, tmp_path / "b", "--layers", "1,4", "--sample-vocab", "50") == first
    assert first.identity.layer_map == [1, 4]
    assert first.identity.sample_vocab == 50
    assert first.environment.threads == 1
    assert {line.rpartition(": ")[2] for line in first.environment.kernels} == {
        "mla_ref",
        "latent_copy",
        "expert_loop",
        "torch_matmul",
        "torch_norm",
        "as_it_is",
    }
    assert max(token for each in first.sequences for token in each.token_ids) < 50
    assert first.bound == reference.FLOAT32_BOUND
    names = {each.name: each for each in first.weights}
    assert names["blocks.1.attention.output.weight"].sources == ["model.layers.4.self_attn.o_proj.weight"]
    assert len({each.digest for each in first.weights}) == len(first.weights)


def test_the_bound_of_a_narrow_dtype_is_measured(tmp_path: Path) -> None:
    llama = write_model(tmp_path / "model", "llama")
    narrow = run(llama, tmp_path / "a", "--dtype", "bfloat16", "--layers", "1,4")
    assert 10 * reference.FLOAT32_BOUND < narrow.bound < 0.5
