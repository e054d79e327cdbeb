"""A text to measure on: a file, or one that comes with Python."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine_core.wire.evidence import Passage
from frontend.errors import UsageError
from frontend.tokenizer.load import load_tokenizer

# Characters of the text that are tokenized for each token wanted: more than any tokenizer's average.
CHARACTERS = 16


def read_passage(model: Path, text: Path | None, tokens: int) -> Passage:
    """The beginning of a text as the model reads it.

    Args:
        model: the folder, for its tokenizer.
        text: a file in UTF-8; None: the language reference that `help()` of this Python shows.
        tokens: ids wanted.

    Raises:
        UsageError: the file cannot be read, or is too short.
        TokenizerError, ModelFolderError: the model has no tokenizer, or a broken one.
    """
    content = python_topics() if text is None else _content(text)
    source = "pydoc_data.topics, joined in the order of their names" if text is None else str(text)
    tokenizer = load_tokenizer(model)
    token_ids = tokenizer.encode(content[: CHARACTERS * tokens], add_special=False, parse_special=False)[:tokens]
    if len(token_ids) < tokens:
        raise UsageError(f"--text: {source}: {len(token_ids)} tokens, --tokens asks for {tokens}")
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Passage(source, digest, tokenizer.encode(""), token_ids, tokenizer.vocab_size)


def python_topics() -> str:
    """The language reference as every CPython carries it; its words differ from version to version."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text: {path}: {error}") from error
