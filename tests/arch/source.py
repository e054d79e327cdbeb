"""The product's source files, parsed."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("frontend", "engine_core", "model_executor")


@dataclass(frozen=True)
class Module:
    """One file: its dotted name, its path and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]


def dotted(path: Path) -> str:
    """The module name of a file below the root."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> tuple[Module, ...]:
    """All modules of the three packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(Module(dotted(path), path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths)


def imports(module: Module) -> set[str]:
    """Full names of what a module imports, at the top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}: relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found
