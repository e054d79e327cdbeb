"""The builds that this machine can run."""

from __future__ import annotations

from functools import cache

from model_executor.native.library import BUILDS, CPUINFO, FOLDER, Native, build_files, processor_flags

THREADS = 2


@cache
def builds() -> tuple[Native, ...]:
    """One library for each; none where the package was built without a compiler."""
    flags = processor_flags(CPUINFO)
    runnable = [name for name, needed in BUILDS.items() if needed <= flags]
    return tuple(Native(path, THREADS) for name in runnable for path in build_files(FOLDER, name))
