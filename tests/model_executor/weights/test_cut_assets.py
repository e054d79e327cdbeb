"""Files that go along with a cut, and links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from model_executor.errors import CheckpointBroken
from model_executor.weights.cut_assets import copy_assets, find_assets


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(folder: Path) -> list[str]:
    return [asset.name for asset in find_assets(folder).copied]


def test_what_goes_along_and_what_does_not(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "templates/a.jinja", "LICENSE", "model.py"):
        write(tmp_path / name)
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "original/a.pth", "x.gguf"):
        write(tmp_path / name)
    for name in (".gitattributes", ".cache/huggingface/a.json", "TERCET_CUT.md", "tercet_cut.json"):
        write(tmp_path / name)
    assets = find_assets(tmp_path)
    copied = [asset.name for asset in assets.copied]
    assert copied == ["LICENSE", "model.py", "templates/a.jinja", "tokenizer.json", "tokenizer.model"]
    assert assets.left[".cache"] == "hidden"
    assert assets.left["original/a.pth"] == "weights, or an archive"
    out = tmp_path / "out"
    made = copy_assets(assets.copied, out)
    assert [asset.file for asset in made] == copied
    assert (out / "templates" / "a.jinja").read_text() == "x"


def test_links_are_followed_within_the_model(tmp_path: Path) -> None:
    hub = tmp_path / "models--a--b"
    blob = write(hub / "blobs" / "0123", "template")
    folder = hub / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "chat_template.jinja").symlink_to(os.path.relpath(blob, folder))
    write(folder / "real.json", "{}")
    (folder / "again.json").symlink_to("real.json")
    (folder / "model.safetensors").symlink_to("/nowhere")
    out = tmp_path / "out"
    out.mkdir()
    copy_assets(find_assets(folder).copied, out)
    assert sorted(path.name for path in out.iterdir()) == ["again.json", "chat_template.jinja", "real.json"]
    assert not any(path.is_symlink() for path in out.iterdir())
    assert (out / "chat_template.jinja").read_text() == "template"


@pytest.mark.parametrize("target", ["../secret", "{absolute}", "sub/../../secret"])
def test_links_out_of_the_model_are_refused(tmp_path: Path, target: str) -> None:
    secret = write(tmp_path / "secret", "keep")
    folder = tmp_path / "model"
    write(folder / "sub" / "a")
    (folder / "tokenizer.json").symlink_to(target.format(absolute=secret))
    with pytest.raises(CheckpointBroken, match=r"tokenizer\.json: a link that leads out of the model"):
        find_assets(folder)


def test_folders_by_link(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder / "templates" / "a.jinja")
    (folder / "same").symlink_to("templates")
    assert names(folder) == ["same/a.jinja", "templates/a.jinja"]
    (folder / "templates" / "up").symlink_to("..")
    with pytest.raises(CheckpointBroken, match="holds itself"):
        find_assets(folder)


def test_broken_links_and_circles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("gone")
    with pytest.raises(CheckpointBroken, match=r"a\.json: a link that leads nowhere"):
        find_assets(tmp_path)
    (tmp_path / "a.json").unlink()
    (tmp_path / "b.json").symlink_to("b.json")
    with pytest.raises(CheckpointBroken, match=r"b\.json: a link that leads nowhere"):
        find_assets(tmp_path)


def test_pipes_are_left(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert find_assets(tmp_path).left == {"pipe": "no regular file"}
