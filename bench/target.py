"""The server that is measured: one that runs already, or our own, started for the run."""

from __future__ import annotations

import http.client
import json
import shlex
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.errors import BenchError, UsageError

ANSWER_S: Final = 30.0


def served(words: str) -> tuple[Path, list[str]]:
    """Model folder and flags out of the ARGS of --serve; without a folder in front, the default model.

    Raises:
        UsageError: there is no default model.
    """
    try:
        given = shlex.split(words)
    except ValueError as error:
        raise UsageError(f"--serve: {error}") from error
    if given and not given[0].startswith("-"):
        return Path(given[0]).expanduser().absolute(), given[1:]
    return default_model(), given


def default_model() -> Path:
    """Its folder; it is made when there is none.

    Raises:
        UsageError: this is no source tree with the script that makes it.
    """
    try:
        from scripts.default_model import default_cache, find_source, make
    except ImportError as error:
        raise UsageError("--serve: MODEL_DIR is missing: only a source tree has a default model") from error
    return make(default_cache(), find_source())


def fetch(url: str, path: str) -> object:
    """The JSON at a path of a server; None: it has none there."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}{path}", timeout=ANSWER_S) as answer:
            found: object = json.loads(answer.read())
            return found
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return None


def model_name(url: str, ask: Callable[[str, str], object] = fetch) -> str:
    """The name of the first model that a server offers.

    Raises:
        BenchError: it offers none.
    """
    match ask(url, "/v1/models"):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise BenchError(f"{url}/v1/models: names no model; give it with --model")
