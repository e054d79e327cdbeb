"""Where a report was made: versions, machine, commit, lock."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from engine_core.wire.evidence import Environment

PACKAGES: Final = ("tercet", "torch", "msgspec", "pyzmq", "safetensors", "tokenizers", "transformers", "starlette")
GIT_S: Final = 10.0
ROOT: Final = Path(__file__).resolve().parents[2]


def surroundings(run: Environment | None, root: Path = ROOT) -> dict[str, str]:
    """By name; what cannot be told is "unknown".

    Args:
        run: of an executor on this machine; None: none came up.
        root: of the source tree.
    """
    found = {name: _version(name) for name in PACKAGES}
    found |= {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": str(len(os.sched_getaffinity(0))),
        "commit": _git(root, "rev-parse", "HEAD") or "unknown",
        "changed files": _changed(root),
        "lock": _digest(root / "requirements.lock"),
    }
    if run is not None:
        found |= {"machine": run.machine, "device": run.device, "threads": str(run.threads)}
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "unknown"


def _changed(root: Path) -> str:
    status = _git(root, "status", "--porcelain")
    return "unknown" if status is None else str(len(status.splitlines()))


def _git(root: Path, *words: str) -> str | None:
    """What git says of the source tree; None: there is no git, or no repository."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
