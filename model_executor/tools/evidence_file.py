"""Where a proving tool puts what it found."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from msgspec import Struct


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that names the file."""
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON too")


def write_json(path: str | None, report: Struct) -> None:
    """Write the report; None: nowhere. A reader sees the old file or the new one, never a part.

    Raises:
        OSError: the file cannot be written.
    """
    if path is None:
        return
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    part.replace(target)
