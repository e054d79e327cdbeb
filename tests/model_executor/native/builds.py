"""The builds that this machine can run."""

from __future__ import annotations

from functools import cache

import pytest

from model_executor.native.library import BUILDS, CPUINFO, FOLDER, Native, build_files, processor_flags

THREADS = 2


@cache
def builds() -> tuple[Native, ...]:
    """One library for each; none where the package was built without a compiler."""
    flags = processor_flags(CPUINFO)
    runnable = [name for name, needed in BUILDS.items() if needed <= flags]
    return tuple(Native(path, THREADS) for name in runnable for path in build_files(FOLDER, name))


def each_build() -> list[object]:
    """The builds as parameters of tests. The one that this machine uses runs always, the others with the slow tests."""
    return [
        pytest.param(native, id=native.name, marks=[pytest.mark.slow] if place else [])
        for place, native in enumerate(builds())
    ]
