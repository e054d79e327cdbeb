"""Hands a command over to a program of another package, which takes this process's place.

The frontend imports no model code; a program that needs it is started as what it is, with its own flags and exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def hand_over(module: str, words: Sequence[str]) -> NoReturn:
    """Become `python -m MODULE WORDS`.

    Raises:
        OSError: Python cannot be started.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *words])  # noqa: S606 - no shell is wanted
