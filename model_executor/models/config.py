"""config.json with typed access: each wrong value is refused under the field's own name."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model_executor.errors import CheckpointBroken, ConfigRefused

LARGEST_FILE: Final = 64 * 2**20
COUNT_LIMIT: Final = 2**31


@dataclass(frozen=True)
class ConfigFile:
    """The fields of a config.json, or of an object inside it.

    A field that is null counts as absent, as in transformers.

    Attributes:
        path: the file, for errors.
        fields: as read.
        prefix: leads each field's name in errors ("rope_scaling.").
    """

    path: Path
    fields: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read the file.

        Raises:
            CheckpointBroken: the folder or the file is missing, or holds no JSON object.
        """
        if not path.parent.is_dir():
            raise CheckpointBroken(path.parent, "no such folder")
        return cls(path, read_json_object(path))

    def __contains__(self, field: str) -> bool:
        return self.fields.get(field) is not None

    def refuse(self, field: str, reason: str) -> ConfigRefused:
        """The error for a field whose value cannot be honoured."""
        return ConfigRefused(self.prefix + field, self.fields.get(field), reason, self.path)

    def count(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`; without a default the field must be there."""
        value = self.fields.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < COUNT_LIMIT:
            raise self.refuse(field, f"must be a whole number from {least} on" if field in self else "is required")
        return value

    def optional_count(self, field: str) -> int | None:
        """A whole number from 1 on, or None."""
        return self.count(field) if field in self else None

    def number(self, field: str, default: float | None = None, *, least: float = 0.0) -> float:
        """A finite number of at least `least`; without a default the field must be there."""
        value = self.fields.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(field, "must be a number" if field in self else "is required")
        # JSON's whole numbers may be too large for a float.
        if not least <= value <= sys.float_info.max:
            raise self.refuse(field, f"must be finite and at least {least:g}")
        return float(value)

    def flag(self, field: str, *, default: bool) -> bool:
        """true or false."""
        value = self.fields.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(field, "must be true or false")
        return value

    def string(self, field: str, default: str) -> str:
        """A text."""
        value = self.fields.get(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(field, "must be a string")
        return value

    def strings(self, field: str) -> tuple[str, ...]:
        """A list of texts, empty when absent."""
        value = self.fields.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(field, "must be a list of strings")
        return tuple(value)

    def indices(self, field: str) -> tuple[int, ...]:
        """A list of whole numbers from 0 on, empty when absent."""
        value = self.fields.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.refuse(field, "must be a list of whole numbers from 0 on")
        return tuple(value)

    def section(self, field: str) -> ConfigFile | None:
        """An object inside this one; None when absent or empty."""
        value = self.fields.get(field)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.refuse(field, "must be an object")
        return ConfigFile(self.path, value, f"{self.prefix}{field}.")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointBroken: with the path and what is wrong.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise CheckpointBroken(path, f"larger than {LARGEST_FILE} bytes")
        raw = path.read_bytes()
        value = json.loads(raw)
        if b"\\u" in raw:
            # Half of a surrogate pair is no text: nothing could write or send it.
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise CheckpointBroken(path, error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointBroken(path, f"no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointBroken(path, "holds no JSON object")
    return value
