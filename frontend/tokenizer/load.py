"""Chooses the tokenizer library by the files of a model folder."""

from __future__ import annotations

import logging
from pathlib import Path

from frontend.errors import TokenizerError
from frontend.model_folder import read_object, tokenizer_files
from frontend.tokenizer.base import Tokenizer
from frontend.tokenizer.hf import HfTokenizer
from frontend.tokenizer.spm import SpmTokenizer

log = logging.getLogger(__name__)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder: tokenizer.json if there is one, else its sentencepiece file.

    tokenizer.json comes first because it is complete: a sentencepiece file leaves added tokens to other files.

    Raises:
        TokenizerError: there is neither, or the file is broken.
        ModelFolderError: a configuration file beside it is broken.
    """
    config = read_object(folder / "tokenizer_config.json", optional=True)
    fast, sentences = tokenizer_files(folder)
    if fast is not None:
        chosen: Tokenizer = HfTokenizer.read(fast, config)
    elif sentences is not None:
        chosen = SpmTokenizer.read(sentences, config)
    else:
        raise TokenizerError(folder, "holds no tokenizer.json and no tokenizer.model")
    log.info("tokenizer: %s, ids below %d", chosen.source, chosen.vocab_size)
    return chosen
