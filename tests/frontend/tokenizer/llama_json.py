"""tokenizer.json of the Llama 2 kind (pieces with byte fallback), made out of a sentencepiece model."""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors


def llama_tokenizer(model: bytes, *, strip: bool = True) -> tokenizers.Tokenizer:
    """The same vocabulary for the tokenizers library.

    Args:
        model: a sentencepiece model of type BPE.
        strip: whether decoding drops a space at the start.
    """
    source = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab: dict[str, int] = {source.id_to_piece(index): index for index in range(source.get_piece_size())}
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(vocab), fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return made


def _merges(vocab: dict[str, int]) -> list[tuple[str, str]]:
    found: list[tuple[int, str, str]] = []
    for piece, rank in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((rank, left, right))
    return [(left, right) for _, left, right in sorted(found, key=lambda merge: merge[0])]


def write_llama(folder: Path, model: bytes, *, strip: bool = True) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    llama_tokenizer(model, strip=strip).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
