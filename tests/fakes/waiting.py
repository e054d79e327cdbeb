"""Waiting for a state in tests: polled, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def until(what: str, holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until `holds()`.

    Raises:
        AssertionError: it did not within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped yet counts as ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
