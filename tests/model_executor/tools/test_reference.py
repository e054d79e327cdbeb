"""The plain execution of a pack: repeatable to the bit, with a digest of every weight."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine_core.wire.evidence import ReferenceRun, WeightDigest
from model_executor.tools import reference
from tests.fixtures.llama import Shape, write_rand
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


def test_products_in_int8_are_those_of_torch(tmp_path: Path) -> None:
    """All but the head. What a kernel keeps of a weight is digested in its place; others may be off by the error of
    int8.
    """
    model = write_rand(tmp_path / "model", shape=Shape(hidden=64, layers=2, intermediate=64))
    plain, whole = run(model, tmp_path / "a"), run(model, tmp_path / "b", "--quantization", "int8")
    assert (plain.identity.quantization, whole.identity.quantization) == ("none", "int8")
    linear = [line for line in whole.environment.kernels if line.startswith("linear")]
    assert [line.rpartition(": ")[2] for line in linear if "in int8" in line] == ["torch_int8"] * (len(linear) - 1)
    assert len(linear) > 2
    assert plain.bound == reference.FLOAT32_BOUND
    assert 10 * reference.FLOAT32_BOUND < whole.bound < 1.0
    before, after = _by_name(plain), _by_name(whole)
    assert before.keys() == after.keys()
    other = {name for name, each in before.items() if each.digest != after[name].digest}
    assert other == {name for name in before if name.startswith("blocks") and "norm" not in name}
    assert all(each.sources == after[name].sources for name, each in before.items())


def _by_name(run: ReferenceRun) -> dict[str, WeightDigest]:
    return {each.name: each for each in run.weights}
