"""The private directory of one server: its sockets and the configuration its children read.

A lock, held as long as the server lives, tells a directory in use from one that a killed server left behind; the next
server of the same user removes the latter.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

PREFIX: Final = "tercet-"
LOCK: Final = "lock"
# A directory without a lock may be one that is being made.
GRACE_S: Final = 60.0


class RuntimeDir:
    """A directory that nobody else may read; made by `create`, gone after `remove`.

    Attributes:
        path: of the directory.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, base: Path) -> RuntimeDir:
        """Make one under `base`, and remove what killed servers left there."""
        sweep(base)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        # The lock is held before it has its name, so that no one finds it free.
        new = path / f"{LOCK}.new"
        lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path / LOCK)
        return cls(path, lock)

    def remove(self) -> None:
        """Remove the directory and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def base_dir(environment: Mapping[str, str]) -> Path:
    """Where runtime directories go: the user's own, else that for temporary files."""
    given = environment.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir() and os.access(given, os.W_OK | os.X_OK):
        return Path(given)
    return Path(tempfile.gettempdir())


def sweep(base: Path) -> int:
    """Remove this user's directories whose server is gone; gives how many."""
    removed = 0
    for path in base.glob(f"{PREFIX}*"):
        try:
            mine = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
            if mine and _abandoned(path):
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
        except FileNotFoundError:
            continue
    if removed:
        logger.info("removed %d runtime directories of servers that were killed", removed)
    return removed


def _abandoned(path: Path) -> bool:
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return time.time() - path.stat().st_mtime > GRACE_S and not any(path.glob("[!l]*"))
    with contextlib.closing(os.fdopen(lock, "rb+")) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
