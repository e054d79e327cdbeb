"""A model folder as the frontend sees it: end-of-sequence ids, chat templates, and whether its files are whole.

The architecture is the executor's business. Nothing in a folder is ever run: Python files are not read, and weights
come from safetensors only. All checks read headers, so that a broken folder is refused in well under a second.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from frontend.errors import ModelFolderError

logger = logging.getLogger(__name__)

MAX_JSON_BYTES: Final = 64 * 2**20
MAX_HEADER_BYTES: Final = 100 * 2**20
DEFAULT_TEMPLATE: Final = "default"
TOKENIZER_JSON: Final = "tokenizer.json"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LFS_START: Final = b"version https://git-lfs"


@dataclass(frozen=True)
class ModelFolder:
    """The facts of a model folder that the frontend needs.

    Attributes:
        path: the folder.
        eos_token_ids: of generation_config.json, else of config.json; the tokenizer's own comes in addition
            (end_ids).
        chat_templates: name -> source; the one called "default" is used.
        template_origin: where the default template was found, for messages; "" without one.
        tokenizer_config: tokenizer_config.json; empty when there is none.
    """

    path: Path
    eos_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]
    template_origin: str
    tokenizer_config: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path, *, chat_template: Path | None = None, weights: bool = True) -> ModelFolder:
        """Read and check a folder.

        Args:
            path: the folder.
            chat_template: a file that takes the place of the folder's templates.
            weights: whether the weights must be there; not so with dummy weights.

        Raises:
            ModelFolderError: names the file and what is wrong with it.
        """
        if not path.is_dir():
            raise ModelFolderError(path, "is no folder" if path.exists() else "does not exist")
        config = read_object(path / "config.json")
        if "auto_map" in config:
            # Names code for families that transformers lacks, or once lacked; what is known here needs none.
            logger.info("%s: auto_map is ignored: code of a model folder is never run", path / "config.json")
        generation = read_object(path / "generation_config.json", optional=True)
        tokenizer_config = read_object(path / "tokenizer_config.json", optional=True)
        _check_tokenizer(path, tokenizer_config)
        if weights:
            _check_weights(path)
        templates, origin = _templates(path, tokenizer_config, chat_template)
        return cls(
            path=path,
            eos_token_ids=_eos_token_ids(path, generation, config),
            chat_templates=MappingProxyType(templates),
            template_origin=origin,
            tokenizer_config=MappingProxyType(tokenizer_config),
        )

    def end_ids(self, tokenizer_eos: int | None) -> tuple[int, ...]:
        """All ids that end a sequence: those of the configuration files and the tokenizer's own, each once."""
        own = () if tokenizer_eos is None else (tokenizer_eos,)
        return tuple(dict.fromkeys((*self.eos_token_ids, *own)))


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object out of a file.

    Args:
        path: the file.
        optional: a missing file gives an empty object.

    Raises:
        ModelFolderError: missing, too large, a pointer of Git LFS, no JSON, or no object.
    """
    if optional and not path.exists():
        return {}
    data = _read(path)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelFolderError(path, f"is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(path, f"must hold a JSON object, holds {type(value).__name__}")
    return value


def _read(path: Path) -> bytes:
    try:
        size = _size(path)
        if size > MAX_JSON_BYTES:
            raise ModelFolderError(path, f"is {size} bytes long, at most {MAX_JSON_BYTES}")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ModelFolderError(path, "is missing") from error
    except OSError as error:
        raise ModelFolderError(path, f"cannot be read: {error.strerror}") from error
    if data.startswith(LFS_START):
        raise ModelFolderError(path, "is a pointer of Git LFS; the file itself was not downloaded")
    return data


def _size(path: Path) -> int:
    """The size of a file, links followed; a pipe would be waited for, and a device read without end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ModelFolderError(path, "is no regular file")
    return found.st_size


def _read_text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise ModelFolderError(path, f"is no UTF-8 text: {error.reason} at byte {error.start}") from error


def _eos_token_ids(path: Path, generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    text_config = config.get("text_config")
    nested = text_config if isinstance(text_config, dict) else {}
    for name, source in (("generation_config.json", generation), ("config.json", config), ("config.json", nested)):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise ModelFolderError(path / name, f"eos_token_id: must be an id or a list of ids, is {value!r}")
        return tuple(dict.fromkeys(ids))
    return ()


def tokenizer_files(path: Path) -> tuple[Path | None, Path | None]:
    """The folder's tokenizer.json, and its sentencepiece vocabulary; None for what is not there.

    Raises:
        ModelFolderError: several files could be the vocabulary, and there is no tokenizer.json.
    """
    fast = path / TOKENIZER_JSON
    found = [path / "tokenizer.model"] if (path / "tokenizer.model").exists() else sorted(path.glob("*.model"))
    if len(found) > 1 and not fast.exists():
        raise ModelFolderError(path, f"several sentencepiece files: {', '.join(file.name for file in found)}")
    return (fast if fast.exists() else None, found[0] if found else None)


def _check_tokenizer(path: Path, tokenizer_config: Mapping[str, Any]) -> None:
    found = [file for file in tokenizer_files(path) if file is not None]
    for file in found:
        _size(file)
    if found:
        return
    auto_map = tokenizer_config.get("auto_map")
    if auto_map:
        raise ModelFolderError(
            path / "tokenizer_config.json", "auto_map: the tokenizer needs code of its own, which is never run"
        )
    raise ModelFolderError(path / TOKENIZER_JSON, "is missing, and there is no tokenizer.model")


def _templates(path: Path, tokenizer_config: Mapping[str, Any], chosen: Path | None) -> tuple[dict[str, str], str]:
    """Templates by name. A file given by hand replaces all; a file of the folder wins over tokenizer_config.json."""
    if chosen is not None:
        return {DEFAULT_TEMPLATE: _read_text(chosen)}, str(chosen)
    templates = _configured_templates(path / "tokenizer_config.json", tokenizer_config.get("chat_template"))
    origin = str(path / "tokenizer_config.json") if DEFAULT_TEMPLATE in templates else ""
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    own = path / "chat_template.jinja"
    if own.exists():
        templates[DEFAULT_TEMPLATE] = _read_text(own)
        origin = str(own)
    return templates, origin


def _configured_templates(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelFolderError(path, "chat_template: must be a text, or a list of {name, template}")
        named[name] = template
    return named


def _check_weights(path: Path) -> None:
    index = path / INDEX_FILE
    files = _indexed(path, index) if index.exists() else sorted(path.glob("*.safetensors"))
    if not files:
        pickled = [file.name for pattern in PICKLED for file in sorted(path.glob(pattern))]
        if pickled:
            raise ModelFolderError(path / pickled[0], "pickled weights are never read; the model needs *.safetensors")
        raise ModelFolderError(path, "holds no *.safetensors")
    for file in files:
        check_safetensors(file)


def _indexed(path: Path, index: Path) -> list[Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(index, "weight_map: must be an object that names a file for each tensor")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or name in {"", ".", ".."} or "\0" in name:
            raise ModelFolderError(index, f"weight_map: {name!r} must be a file name, without a folder")
    # A file may be absent whose tensors nobody asks for: which those are, the executor knows.
    return [path / name for name in names if (path / name).exists()] or [path / names[0]]


def check_safetensors(path: Path) -> None:
    """Check that a safetensors file has a header and is as long as the header says.

    Raises:
        ModelFolderError: missing, a pointer of Git LFS, cut, or no safetensors file.
    """
    try:
        size = _size(path)
        with path.open("rb") as file:
            start = file.read(8)
            if LFS_START.startswith(start) and file.read(len(LFS_START) - 8) == LFS_START[8:]:
                raise ModelFolderError(path, "is a pointer of Git LFS; the weights were not downloaded")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length < 2 or length > MAX_HEADER_BYTES:
                raise ModelFolderError(path, f"is no safetensors file: a header of {length} bytes ({size} in all)")
            if 8 + length > size:
                raise ModelFolderError(path, f"is cut: {size} bytes long, the header alone takes {8 + length}")
            file.seek(8)
            header = file.read(length)
    except FileNotFoundError as error:
        raise ModelFolderError(path, "is missing") from error
    except OSError as error:
        raise ModelFolderError(path, f"cannot be read: {error.strerror}") from error
    expected = 8 + length + _data_bytes(path, header)
    if size != expected:
        how = "is cut" if size < expected else "holds more than its header names"
        raise ModelFolderError(path, f"{how}: {size} bytes long, its header asks for {expected}")


def _data_bytes(path: Path, header: bytes) -> int:
    try:
        entries = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
        return max(
            (int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"), default=0
        )
    except (msgspec.DecodeError, msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
        raise ModelFolderError(path, f"has a header that is no safetensors header: {error}") from error
