"""Which library reads a folder's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.errors import ModelFolderError, TokenizerError
from frontend.tokenizer.hf import HfTokenizer
from frontend.tokenizer.load import load_tokenizer
from frontend.tokenizer.spm import SpmTokenizer
from tests.fixtures.bbpe import Bbpe, write_bbpe
from tests.fixtures.spm import trained_model, write_spm


def test_tokenizer_json_comes_first(tmp_path: Path) -> None:
    write_spm(tmp_path, trained_model())
    assert isinstance(load_tokenizer(tmp_path), SpmTokenizer)
    write_bbpe(tmp_path, Bbpe())
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HfTokenizer)
    assert tokenizer.source == f"{tmp_path / 'tokenizer.json'} (tokenizers)"


def test_another_name_of_the_sentencepiece_file(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(trained_model())
    assert load_tokenizer(tmp_path).source == f"{tmp_path / 'spiece.model'} (sentencepiece)"


def test_two_candidates_are_refused(tmp_path: Path) -> None:
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(trained_model())
    with pytest.raises(ModelFolderError, match=r"a\.model, b\.model"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.real_model
def test_the_default_model(default_model: Path) -> None:
    tokenizer = load_tokenizer(default_model)
    text = "Na\u00efve \u4f60\u597d \U0001f600, 12345!\n\tdef f(): pass"
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids) == text
    decoder = tokenizer.decoder()
    pieces = [decoder.push(token_id) for token_id in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + decoder.finish() == text
