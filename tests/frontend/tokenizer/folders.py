"""Folders with a tokenizer and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from frontend.tokenizer.base import Tokenizer
from frontend.tokenizer.load import load_tokenizer
from tests.fixtures.bbpe import Bbpe, write_bbpe
from tests.fixtures.spm import trained_model, write_spm
from tests.frontend.tokenizer.llama_json import write_llama


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


@cache
def bbpe() -> Tokenizer:
    """Byte-level BPE with two EOS ids and other special tokens."""
    with _folder() as folder:
        write_bbpe(folder, Bbpe(add_bos=True))
        return load_tokenizer(folder)


@cache
def spm() -> Tokenizer:
    """A trained sentencepiece vocabulary with byte fallback."""
    with _folder() as folder:
        write_spm(folder, trained_model())
        return load_tokenizer(folder)


@cache
def llama(*, strip: bool = True) -> Tokenizer:
    """The same vocabulary as tokenizer.json."""
    with _folder() as folder:
        write_llama(folder, trained_model(), strip=strip)
        return load_tokenizer(folder)


def decoded(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, *, skip: bool = True) -> str:
    """The text of ids, by the incremental decoder."""
    decoder = tokenizer.decoder(prompt or [], skip_special=skip)
    return "".join([decoder.push(token_id) for token_id in ids]) + decoder.finish()
