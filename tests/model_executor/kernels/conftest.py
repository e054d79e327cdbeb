"""Compiles the kernels for a GPU once; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DEADLINE_S = 300.0
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[str]]:
    """Lines that tests.gpu.compile prints for a compute capability and a set of shapes."""
    made: dict[tuple[int, str], list[str]] = {}
    cache = tmp_path_factory.mktemp("triton")

    def lines(capability: int, shapes: str) -> list[str]:
        if (capability, shapes) not in made:
            command = [sys.executable, "-m", "tests.gpu.compile", str(capability), shapes]
            environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=DEADLINE_S, check=False, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
            made[capability, shapes] = done.stdout.splitlines()
        return made[capability, shapes]

    return lines
