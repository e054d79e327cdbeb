"""The flags with which the tools choose what they run, and the options they give."""

from __future__ import annotations

import argparse
from pathlib import Path

from model_executor.device import DTYPES
from model_executor.tools.command import add_layer_flags
from model_executor.tools.offline import OfflineOptions


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Model folder, blocks, dtype, quantization and the dtype of the cache; as of `tercet serve`."""
    parser.add_argument("model", metavar="MODEL_DIR", help="model folder")
    add_layer_flags(parser, "full")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="computed in (default: auto)")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none", help="of products (default: none)")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", *DTYPES), default="auto", help="of keys and values (default: auto)"
    )


def add_vocab_flag(parser: argparse.ArgumentParser) -> None:
    """How many ids may be chosen; at least two, as the lead over the second is told."""
    parser.add_argument("--sample-vocab", metavar="N", type=_vocab, help="ids that may be chosen (default: all)")


def _vocab(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 2 on")
    return int(text)


def run_options(args: argparse.Namespace) -> OfflineOptions:
    """What the flags of add_run_flags ask for."""
    return OfflineOptions(
        folder=Path(args.model),
        layers=args.layers,
        allow_missing_classes=args.allow_missing_classes,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    )
