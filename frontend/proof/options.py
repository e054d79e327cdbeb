"""What the commands that prove a model share: flags for the choice of blocks, and where a report goes."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from msgspec import Struct

from frontend.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Model folder, choice of blocks, dtype, quantization and dtype of the KV cache."""
    parser.add_argument("model", metavar="MODEL_DIR", help="model folder")
    parser.add_argument("--layers", metavar="CHOICE", default="full", help="blocks, as of tercet serve (default: full)")
    parser.add_argument(
        "--allow-missing-classes", action="store_true", help="take a choice that leaves a class of blocks out"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="computed in (default: auto)")
    parser.add_argument(
        "--quantization", choices=("none", "int8"), default="none", help="as of tercet serve (default: none)"
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=DTYPES, default="auto", help="of keys and values, likewise (default: auto)"
    )


def layer_flags(args: argparse.Namespace) -> list[str]:
    """The choice of blocks, as the tools and the server take it."""
    return ["--layers", args.layers, *(["--allow-missing-classes"] if args.allow_missing_classes else [])]


def precision_flags(args: argparse.Namespace) -> list[str]:
    """Dtype, quantization and dtype of the KV cache, likewise."""
    return ["--dtype", args.dtype, "--quantization", args.quantization, "--kv-cache-dtype", args.kv_cache_dtype]


def model_flags(args: argparse.Namespace) -> list[str]:
    """All that add_model_flags declares but the folder."""
    return [*layer_flags(args), *precision_flags(args)]


def write_report(path: Path, report: Struct) -> None:
    """Write a report as JSON, whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    write_text(path, msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file and the folder above it; a reader sees the old file or the new one, never a part.

    Raises:
        UsageError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
