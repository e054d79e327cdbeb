"""The text that quality is measured on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from frontend.errors import TokenizerError, UsageError
from frontend.proof.passage import python_topics, read_passage
from frontend.tokenizer.load import load_tokenizer
from tests.model_executor.tools.folders import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", "llama")


def test_the_default_is_the_prose_in_this_python(folder: Path) -> None:
    passage = read_passage(folder, None, 1536)
    text = python_topics()
    assert "pydoc_data.topics" in passage.source
    assert passage.sha256 == hashlib.sha256(text.encode()).hexdigest()
    tokenizer = load_tokenizer(folder)
    assert len(passage.token_ids) == 1536
    assert text.startswith(tokenizer.decode(passage.token_ids[:-4]))
    assert passage.vocab == tokenizer.vocab_size
    assert max(passage.token_ids) < passage.vocab
    assert tokenizer.encode("b", add_special=True) == passage.prefix + tokenizer.encode("b", add_special=False)


def test_a_file_is_read_as_plain_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("Two readers wait. " * 40, encoding="utf-8")
    passage = read_passage(folder, path, 50)
    assert passage.source == str(path)
    assert passage.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert passage.token_ids == load_tokenizer(folder).encode("Two readers wait. " * 40, add_special=False)[:50]


@pytest.mark.parametrize(("content", "message"), [(b"short", "asks for 50"), (b"\xff\xfe", "utf-8"), (None, "No such")])
def test_what_is_no_text_is_refused(folder: Path, tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"--text: .*{message}"):
        read_passage(folder, path, 50)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError):
        read_passage(tmp_path, None, 50)
