"""Model folders: what is read, and what is refused, by name."""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from frontend.errors import EXIT_REFUSED, ModelFolderError
from frontend.model_folder import ModelFolder, check_safetensors, read_object
from frontend.tokenizer.load import load_tokenizer
from tests.fixtures.bad import BAD, Bad
from tests.fixtures.bbpe import SPECIALS, Bbpe, write_bbpe
from tests.fixtures.safetensors_file import write_file

# What these folders break only the executor can see.
OF_THE_EXECUTOR = {
    *("unknown_architecture", "unknown_rope", "unknown_activation", "uneven_heads", "no_hidden_size"),
    *("missing_tensor", "unexpected_tensor", "wrong_shape", "no_head"),
}
OF_THE_TOKENIZER = {"tokenizer_no_json"}


def bare(folder: Path, **files: Any) -> Path:
    """A folder with a tokenizer, an empty config.json, and further JSON files."""
    write_bbpe(folder, Bbpe())
    for name, content in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def opened(folder: Path, **options: Any) -> ModelFolder:
    """The folder, without weights."""
    return ModelFolder.open(folder, weights=False, **options)


def test_a_whole_folder(chain_folder: Path) -> None:
    folder = ModelFolder.open(chain_folder)
    assert folder.path == chain_folder
    assert folder.eos_token_ids


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.name not in OF_THE_EXECUTOR], ids=lambda bad: bad.name)
def test_broken_folders_are_refused_by_name(rand_folder: Path, tmp_path: Path, bad: Bad) -> None:
    folder = tmp_path / "model"
    shutil.copytree(rand_folder, folder)
    bad.apply(folder)
    started = time.monotonic()
    if bad.name in OF_THE_TOKENIZER:
        ModelFolder.open(folder)
        return
    with pytest.raises(ModelFolderError) as caught:
        ModelFolder.open(folder)
    assert time.monotonic() - started < 1.0
    assert str(folder) in str(caught.value)
    for name in bad.names:
        assert name in str(caught.value)
    assert caught.value.exit_code == EXIT_REFUSED


class TestEndIds:
    """Which ids end a sequence."""

    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [
            ({"eos_token_id": [7, 8, 7]}, {"eos_token_id": 7}, (7, 8)),
            ({"eos_token_id": 9}, {"eos_token_id": [7]}, (9,)),
            ({"eos_token_id": None}, {"eos_token_id": [7, 8]}, (7, 8)),
            ({}, {"eos_token_id": 7}, (7,)),
            ({}, {"text_config": {"eos_token_id": 7}}, (7,)),
            ({}, {"eos_token_id": None, "text_config": None}, ()),
        ],
    )
    def test_generation_config_then_config(
        self, tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
    ) -> None:
        folder = opened(bare(tmp_path, generation_config=generation, config=config))
        assert folder.eos_token_ids == expected

    def test_without_a_generation_config(self, tmp_path: Path) -> None:
        assert opened(bare(tmp_path, config={"eos_token_id": 3})).eos_token_ids == (3,)

    def test_the_tokenizer_s_own_ends_too(self, tmp_path: Path) -> None:
        folder = opened(bare(tmp_path, config={"eos_token_id": [3, 257]}))
        end = SPECIALS["<|end|>"]
        assert folder.end_ids(load_tokenizer(tmp_path).eos_id) == (3, 257, end)
        assert folder.end_ids(3) == (3, 257)
        assert folder.end_ids(None) == (3, 257)

    @pytest.mark.parametrize("value", ["7", [], [True], [-1], [2**31], {"a": 1}, 1.5])
    def test_other_values_are_refused(self, tmp_path: Path, value: Any) -> None:
        with pytest.raises(ModelFolderError, match=r"generation_config\.json: eos_token_id"):
            opened(bare(tmp_path, generation_config={"eos_token_id": value}))


class TestCode:
    """Folders that want code run."""

    def test_a_model_with_code(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        bare(tmp_path, config={"eos_token_id": 3})
        with caplog.at_level(logging.INFO):
            plain = opened(tmp_path)
            assert not caplog.records
            bare(tmp_path, config={"eos_token_id": 3, "auto_map": {"AutoModel": "x.Y"}})
            assert opened(tmp_path) == plain
        (note,) = caplog.messages
        assert note.endswith("config.json: auto_map is ignored: code of a model folder is never run")

    def test_a_tokenizer_with_code(self, tmp_path: Path) -> None:
        bare(tmp_path, tokenizer_config={"auto_map": {"AutoTokenizer": ["x.Y", None]}})
        # With tokenizer.json the code is not needed.
        opened(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(ModelFolderError, match=r"tokenizer_config\.json: auto_map"):
            opened(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
    def test_pickled_weights(self, tmp_path: Path, name: str) -> None:
        bare(tmp_path)
        (tmp_path / name).write_bytes(b"\x80\x04N.")
        with pytest.raises(ModelFolderError, match=f"{name}: pickled"):
            ModelFolder.open(tmp_path)


class TestShards:
    """An index and its files."""

    def index(self, folder: Path, weight_map: Any) -> Path:
        """A folder with this index."""
        bare(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    def test_every_file_that_is_there_is_looked_at(self, tmp_path: Path) -> None:
        self.index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
        with pytest.raises(ModelFolderError, match=r"one\.safetensors: is missing"):
            ModelFolder.open(tmp_path)
        write_file(tmp_path / "one.safetensors", {})
        ModelFolder.open(tmp_path)
        (tmp_path / "two.safetensors").write_bytes(b"cut")
        with pytest.raises(ModelFolderError, match=r"two\.safetensors: is no safetensors file"):
            ModelFolder.open(tmp_path)

    @pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
    def test_no_file_outside(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ModelFolderError, match="weight_map"):
            ModelFolder.open(self.index(tmp_path, {"a": name}))

    @pytest.mark.parametrize("weight_map", [None, {}, [], "a"])
    def test_no_weight_map(self, tmp_path: Path, weight_map: Any) -> None:
        with pytest.raises(ModelFolderError, match="weight_map"):
            ModelFolder.open(self.index(tmp_path, weight_map))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"[]", "no safetensors header"),
        (b'{"a": {}}', "no safetensors header"),
        (b'{"a": {"data_offsets": [0, 4]}}', "is cut"),
        (b'{"a": 5}', "no safetensors header"),
        (b"{}x", "no safetensors header"),
    ],
)
def test_headers(tmp_path: Path, header: bytes, says: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelFolderError, match=says):
        check_safetensors(path)


def test_a_file_longer_than_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}" + b"rest")
    with pytest.raises(ModelFolderError, match="holds more"):
        check_safetensors(path)


class TestTemplates:
    """Where templates are found."""

    def test_no_template(self, tmp_path: Path) -> None:
        folder = opened(bare(tmp_path))
        assert (folder.chat_templates, folder.template_origin) == ({}, "")

    def test_a_file_wins_over_the_configuration(self, tmp_path: Path) -> None:
        bare(tmp_path, tokenizer_config={"chat_template": "configured"})
        folder = opened(tmp_path)
        assert folder.chat_templates == {"default": "configured"}
        assert folder.template_origin.endswith("tokenizer_config.json")
        (tmp_path / "chat_template.jinja").write_text("file \u00e9", encoding="utf-8")
        folder = opened(tmp_path)
        assert folder.chat_templates == {"default": "file \u00e9"}
        assert folder.template_origin.endswith("chat_template.jinja")

    def test_named_templates(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
        bare(tmp_path, tokenizer_config={"chat_template": named})
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("c")
        assert opened(tmp_path).chat_templates == {"default": "a", "tool_use": "b", "rag": "c"}

    def test_a_file_given_by_hand_replaces_all(self, tmp_path: Path) -> None:
        bare(tmp_path, tokenizer_config={"chat_template": "configured"})
        chosen = tmp_path / "mine.jinja"
        with pytest.raises(ModelFolderError, match=r"mine\.jinja: is missing"):
            opened(tmp_path, chat_template=chosen)
        chosen.write_text("mine")
        folder = opened(tmp_path, chat_template=chosen)
        assert (folder.chat_templates, folder.template_origin) == ({"default": "mine"}, str(chosen))

    @pytest.mark.parametrize("value", [5, {"a": 1}, ["x"], [{"name": "a"}]])
    def test_other_values_are_refused(self, tmp_path: Path, value: Any) -> None:
        with pytest.raises(ModelFolderError, match=r"tokenizer_config\.json: chat_template"):
            opened(bare(tmp_path, tokenizer_config={"chat_template": value}))

    def test_a_template_that_is_no_text(self, tmp_path: Path) -> None:
        bare(tmp_path)
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(ModelFolderError, match="no UTF-8"):
            opened(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b'"text"', "must hold a JSON object, holds str"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
        (b"\xff", "no valid JSON"),
    ],
)
def test_json_files(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelFolderError, match=says):
        read_object(path)


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelFolderError, match="is no regular file"):
        read_object(tmp_path / "config.json")


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(ModelFolderError, match="is no folder"):
        ModelFolder.open(tmp_path / "model.gguf")
