"""What the code was that was measured: a digest of each file, which changes only when what it does changes.

Comments, docstrings and the form of Python files do not count; every byte of other files does.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("frontend", "engine_core", "model_executor")
# Made while it runs, and no source.
PASSED_OVER: Final = frozenset({".pyc", ".so"})


def source_digests(patterns: Sequence[str] = PACKAGES, root: Path = ROOT) -> dict[str, str]:
    """Digest by path below the root.

    Args:
        patterns: files, folders (with all in them), or globs, relative to the root.
        root: of the source tree.
    """
    return {path.relative_to(root).as_posix(): digest(path) for path in sorted(set(_files(patterns, root)))}


def _files(patterns: Sequence[str], root: Path) -> Iterator[Path]:
    for pattern in patterns:
        for path in sorted(root.glob(pattern.rstrip("/"))):
            inside = path.rglob("*") if path.is_dir() else [path]
            yield from (each for each in inside if each.is_file() and each.suffix not in PASSED_OVER)


def digest(path: Path) -> str:
    """16 hexadecimal digits."""
    content = path.read_bytes()
    if path.suffix == ".py":
        content = "".join(_parts(ast.parse(content))).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _parts(value: object) -> Iterator[str]:
    """A syntax tree in words. Fields that are empty are left out: later versions of Python have more of them."""
    if isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, field in ast.iter_fields(value):
            kept = _without_docstring(value, field) if name == "body" else field
            if kept is not None and kept != []:
                yield f" {name}="
                yield from _parts(kept)
        yield ")"
    elif isinstance(value, list):
        for each in value:
            yield from _parts(each)
    else:
        yield repr(value)


def _without_docstring(owner: ast.AST, body: object) -> object:
    if not isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return body
    if ast.get_docstring(owner, clean=False) is not None and isinstance(body, list):
        return body[1:]
    return body
