"""`tercet cut`: what it writes, what it records, what it refuses, and that it leaves the source alone."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_executor.tools import cut as cut_command
from model_executor.tools.cut import main
from model_executor.tools.cutter import Cut, check_output
from model_executor.tools.model import open_model
from model_executor.weights.cut_assets import MARKDOWN, RECORD
from model_executor.weights.header import read_header
from model_executor.weights.index import Checkpoint
from tests.fixtures import expert_families, families
from tests.fixtures.llama import parameter_shapes, random_weights
from tests.model_executor.engine import SIX, draw, load, write_small
from tests.model_executor.tools.folders import cut, digests, fields, in_transformers, record, tensors
from tests.model_executor.tools.giants import V3, v3_tensors, write_headers

PROMPT = np.random.default_rng(11).integers(1, 64, 24).tolist()
ONE_TENSOR_A_SHARD = len(parameter_shapes(SIX))


def refused(capsys: pytest.CaptureFixture[str], status: int, *words: object) -> str:
    """The one line that a refused cut prints; it leaves nothing behind."""
    capsys.readouterr()
    parent = Path(str(words[1])).parent
    before = sorted(parent.iterdir()) if parent.is_dir() else []
    assert main([str(word) for word in words]) == status
    assert (sorted(parent.iterdir()) if parent.is_dir() else []) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_what_is_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_small(tmp_path / "source", SIX, shards=5, unknown={"kept": [1, None, "\u00e9"]}, torch_dtype=...)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    before = digests(source)
    out = cut(source, tmp_path / "out", [0, 2, 5], "--max-shard-size", "20kB")
    assert digests(source) == before
    assert fields(out) == {**fields(source), "num_hidden_layers": 3}
    assert list(fields(out)) == list(fields(source))
    wanted = {
        name.replace(f"layers.{old}.", f"layers.{new}."): raw
        for name, raw in tensors(source).items()
        for new, old in {0: 0, 1: 2, 2: 5, None: None}.items()
        if (f"layers.{old}." in name if old is not None else "layers." not in name)
    }
    assert tensors(out) == wanted
    names = {path.name for path in out.iterdir()}
    assert {"chat_template.jinja", "generation_config.json", MARKDOWN, RECORD} <= names
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    assert not [path for path in tmp_path.iterdir() if path.name not in ("source", "out")]
    printed = capsys.readouterr().out
    for word in (
        "blocks: 0,2,5 of 0-5",
        "edit: num_hidden_layers",
        "27 tensors: its block is cut",
        "to write",
        "float32",
    ):
        assert word in printed


def test_the_record_is_true(tmp_path: Path) -> None:
    source = write_small(tmp_path / "source", SIX, shards=ONE_TENSOR_A_SHARD)
    out = cut(source, tmp_path / "out", [1, 4])
    made = record(out)
    assert [(row["block"], row["source"]) for row in made["blocks"]] == [(0, 1), (1, 4)]
    assert made["command"] == (
        "tercet cut source OUT --layers 1,4 --mode weights --mtp drop --max-shard-size 5000000000"
        " --allow-missing-classes"
    )
    assert [(edit["field"], edit["before"], edit["after"]) for edit in made["edits"]] == [("num_hidden_layers", 6, 2)]
    here = tensors(out)
    assert {row["name"]: row["sha256"] for row in made["tensors"]} == {
        name: hashlib.sha256(raw).hexdigest() for name, raw in here.items()
    }
    assert made["bytes"] == sum(map(len, here.values()))
    assert sum(made["left_out"].values()) + len(made["tensors"]) == len(tensors(source))
    checkpoint = Checkpoint.open(source)
    assert made["source"]["revision"] == checkpoint.revision
    used = {row["file"]: row["header_sha256"] for row in made["source"]["files"]}
    assert used == {name: hashlib.sha256(read_header(source / name).raw).hexdigest() for name in used}
    assert sorted([*used, *made["source"]["files_not_needed"]]) == checkpoint.shards
    rest = {row["file"]: row["sha256"] for row in made["assets"]}
    assert rest.items() <= digests(out).items()
    assert digests(out).keys() - rest.keys() == {MARKDOWN, RECORD, "model.safetensors"}
    text = (out / MARKDOWN).read_text()
    for word in (made["command"], made["source"]["revision"], "| 1 | 4 |", "num_hidden_layers", "ignore_eos"):
        assert word in text
    assert str(tmp_path) not in text + (out / RECORD).read_text()


def test_repeatable_to_the_byte(tmp_path: Path) -> None:
    source = write_small(tmp_path / "source", SIX, shards=5)
    one, other = (cut(source, tmp_path / name, [0, 3], "--max-shard-size", "20kB") for name in ("a", "b"))
    assert digests(one) == digests(other)


def test_files_that_hold_no_chosen_block_may_be_absent(tmp_path: Path) -> None:
    source = write_small(tmp_path / "source", SIX, shards=ONE_TENSOR_A_SHARD)
    whole = cut(source, tmp_path / "a", [0, 3])
    for file in record(whole)["source"]["files_not_needed"]:
        (source / file).unlink()
    assert digests(cut(source, tmp_path / "b", [0, 3])) == digests(whole)


def test_a_cut_of_a_cut_knows_where_it_came_from(tmp_path: Path) -> None:
    source = write_small(tmp_path / "source", SIX)
    first = cut(source, tmp_path / "first", [0, 2, 5])
    second = cut(first, tmp_path / "second", [1, 2])
    assert record(second)["source"]["cut_of"]["name"] == "source"
    assert np.array_equal(load(second).logits(PROMPT), load(source, [2, 5]).logits(PROMPT))


@pytest.mark.parametrize("head", ["tied", "tied with an equal head", "tied with another head", "untied"])
def test_heads_stay_as_they_are(tmp_path: Path, head: str) -> None:
    drawn = random_weights(SIX, seed=3, std=0.15)
    table = drawn["model.embed_tokens.weight"]
    extra = {"tied": None, "tied with an equal head": table}.get(head, drawn["lm_head.weight"])
    source = write_small(
        tmp_path / "source", SIX, tensors={"lm_head.weight": extra}, tie_word_embeddings=head != "untied"
    )
    out = cut(source, tmp_path / "out", [0, 4])
    assert ("lm_head.weight" in tensors(out)) == (extra is not None)
    assert fields(out)["tie_word_embeddings"] == (head != "untied")
    assert np.array_equal(load(out).logits(PROMPT), load(source, [0, 4]).logits(PROMPT))


def test_buffers_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    ones = np.ones(4, np.float32)
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.masked_bias"]
    source = write_small(tmp_path / "source", SIX, tensors=dict.fromkeys(names, ones))
    out = cut(source, tmp_path / "out", [0, 1])
    assert not set(names) & set(tensors(out))
    assert "rotation is computed from config.json" in record(out)["left_out"]


def test_dummy_mode_needs_and_gives_no_weights(tmp_path: Path) -> None:
    source = write_small(tmp_path / "source", SIX)
    (source / "model.safetensors").unlink()
    out = cut(source, tmp_path / "out", [0, 4], "--mode", "dummy")
    assert {path.suffix for path in out.iterdir()} <= {".json", ".md"}
    assert record(out)["tensors"] == []
    assert len(draw(out).plan.sources) == 2


def test_old_style_periods(tmp_path: Path) -> None:
    """A configuration that names no layer types: the kinds are written out, and transformers reads them."""
    cases: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
        ("gemma2", {}, (1, 2, 5)),
        ("gemma3_text", {"sliding_window_pattern": 3}, (2, 3)),
    ]
    for model_type, more, keep in cases:
        source = families.write_family(tmp_path / model_type, model_type)
        families.edit_config(source, layer_types=..., _sliding_window_pattern=..., **more)
        out = cut(source, tmp_path / f"{model_type}-out", keep)
        assert len(fields(out)["layer_types"]) == len(keep)
        both = in_transformers(source, out, keep, PROMPT)
        assert both.faults == []
        assert np.array_equal(both.cut, both.removed)
        assert np.array_equal(load(out).logits(PROMPT), load(source, keep).logits(PROMPT))


@pytest.mark.parametrize("keep", [(0, 1), (0, 1, 2, 3), (0, 3, 5)], ids=str)
def test_dense_prefix_of_three(tmp_path: Path, keep: tuple[int, ...]) -> None:
    source = expert_families.write_experts(tmp_path / "source", "deepseek-v3")
    out = cut(source, tmp_path / "out", keep)
    sparse = [layer.mlp.kind == "moe" for layer in open_model(out).spec.layers]
    assert sparse == [block >= 3 for block in keep]
    both = in_transformers(source, out, keep, PROMPT)
    assert both.faults == []
    assert np.array_equal(both.cut, both.removed)
    whole = load(out)
    counted = sum(len(raw) for raw in tensors(out).values())
    assert whole.report.bytes_materialized == counted == whole.report.bytes_read


def test_a_dense_prefix_must_not_hide_the_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = expert_families.write_experts(tmp_path / "source", "deepseek-v3")
    line = refused(capsys, 3, source, tmp_path / "out", "--layers", "first:2")
    assert "moe" in line
    assert "cover would be 0,3" in line
    assert main([str(source), str(tmp_path / "out"), "--layers", "cover"]) == 0
    assert record(tmp_path / "out")["classes_left_out"] == []
    cut(source, tmp_path / "dense", [0, 1])
    (left,) = record(tmp_path / "dense")["classes_left_out"]
    assert "moe" in left


@pytest.mark.parametrize("mtp", ["keep", "drop"])
def test_prediction_blocks(tmp_path: Path, mtp: str) -> None:
    source = expert_families.write_experts(tmp_path / "source", "deepseek-v3")
    names = expert_families.add_mtp(source, shards=4)
    families.edit_config(source, num_nextn_predict_layers=1, num_mtp_layers=...)
    out = cut(source, tmp_path / "out", [0, 3], "--mtp", mtp)
    moved = {name.replace("model.layers.6.", "model.layers.2.") for name in names}
    beyond = {name for name in tensors(out) if name.startswith("model.layers.2.")}
    assert beyond == (moved if mtp == "keep" else set())
    assert fields(out)["num_nextn_predict_layers"] == (1 if mtp == "keep" else 0)
    assert record(out)["prediction"] == mtp
    assert np.array_equal(load(out).logits(PROMPT), load(source, [0, 3]).logits(PROMPT))
    both = in_transformers(source, out, [0, 3], PROMPT)
    # transformers has no place for prediction blocks, and says so of the source as well.
    assert bool(both.faults) == (mtp == "keep")
    assert all(fault.startswith("unexpected_keys: model.layers.2.") for fault in both.faults)
    assert np.array_equal(both.cut, both.removed)


def test_a_block_without_a_number_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors behind the last block that no count accounts for are neither blocks nor prediction blocks."""
    own = {"model.layers.6.eh_proj.weight": np.ones(4, np.float32)}
    source = write_small(tmp_path / "source", SIX, tensors=own)
    assert "unexpected: model.layers.6.eh_proj.weight" in refused(
        capsys, 3, source, tmp_path / "out", "--layers", "first:2"
    )


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ({"secret_scales": [1.0] * 6}, "secret_scales"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"attn_layer_period": 4}, "attn_layer_period"),
        ({"scale_depth": 1.4}, "scale_depth"),
        ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_that_cannot_be_moved(
    tmp_path: Path, edit: Mapping[str, Any], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_small(tmp_path / "source", SIX, **edit)
    assert word in refused(capsys, 3, source, tmp_path / "out", "--layers", "2,3")


def test_outputs_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_small(tmp_path / "source", SIX)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for out, word in (
        (full, "is there already"),
        (full / "file", "is there already"),
        (tmp_path / "link", "is there already"),
        (source / "inside", "lies in the source"),
        (tmp_path / "no" / "out", "the folder above it does not exist"),
    ):
        assert word in refused(capsys, 2, source, out, "--layers", "0")
    empty = tmp_path / "empty"
    empty.mkdir()
    cut(source, empty, [0])
    assert (empty / RECORD).is_file()


def test_a_full_disk_is_seen_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_small(tmp_path / "source", SIX)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "and 1000 are free there" in refused(capsys, 2, source, tmp_path / "out", "--layers", "0")


@pytest.mark.parametrize("size", ["5kB", "5GB"])
def test_no_more_is_written_than_was_asked_for(
    tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_small(tmp_path / "source", SIX), tmp_path / "out"
    planned: list[int] = []

    def seen(one: Path, other: Path, made: Cut) -> int:
        planned.append(made.bytes_to_write)
        return check_output(one, other, made)

    monkeypatch.setattr(cut_command, "check_output", seen)
    cut(source, out, [0, 5], "--max-shard-size", size)
    (limit,) = planned
    blocks = sum(path.stat().st_blocks * 512 for path in out.iterdir())
    assert blocks <= limit
    written = sum(path.stat().st_size for path in out.iterdir())
    assert f"({written} bytes) written in all" in capsys.readouterr().out


def test_a_mounted_folder_cannot_be_given_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_small(tmp_path / "source", SIX), tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self == out)
    assert "a file system of its own" in refused(capsys, 2, source, out, "--layers", "0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--layers"),
        (("--layers", "0", "--mode", "half"), "--mode"),
        (("--layers", "0", "--mtp", "move"), "--mtp"),
        (("--layers", "0", "--max-shard-size", "5 GB"), "'5 GB' is no size"),
        (("--layers", "0", "--max-shard-size", "0"), "'0' is no size"),
        (("--layer", "0"), "--layer"),
    ],
)
def test_flags(tmp_path: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, 2, "source", tmp_path / "out", *words)


def test_a_source_that_breaks_meanwhile_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_small(tmp_path / "source", SIX)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "cut" in refused(capsys, 3, source, tmp_path / "out", "--layers", "0,5")


def test_a_terminated_cut_leaves_nothing(tmp_path: Path) -> None:
    """The program is stopped in the middle of the copy: neither OUT nor a part of it stays."""
    source = tmp_path / "source"
    write_headers(source, {**V3, "num_nextn_predict_layers": 0}, (t for t in v3_tensors() if ".61." not in t[0]))
    for shard in source.glob("*.safetensors"):
        end = max(entry.end for entry in read_header(shard, cut=True).entries.values())
        with shard.open("r+b") as file:
            file.truncate(end)  # all of it a hole
    command = [
        sys.executable,
        "-m",
        "model_executor.tools.cut",
        str(source),
        str(tmp_path / "out"),
        "--layers",
        "cover",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("memory:"):
                break
        else:
            pytest.fail("no budget was printed")
        while not list(tmp_path.glob(".out.*/*.safetensors")):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_giant_is_cut_without_its_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_headers(source, V3, v3_tensors())
    out = cut(source, tmp_path / "out", [0, 3, 60], "--mode", "dummy")
    made = fields(out)
    assert made == {**V3, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    assert [layer.mlp.kind for layer in open_model(out).spec.layers] == ["gated", "moe", "moe"]
