"""What all Triton kernels need and take."""

from __future__ import annotations

import subprocess
import sys

import pytest

from model_executor.kernels import limits


@pytest.mark.parametrize(
    ("value", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (80, 128), (128, 128), (129, 256), (2**20 + 1, 2**21)]
)
def test_power_above(value: int, power: int) -> None:
    assert limits.power_above(value) == power


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.missing() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert limits.missing() == "package triton: not installed"


def test_the_operators_that_use_triton_are_listed_without_it() -> None:
    modules = ["attention.triton_paged", "layers.triton_gated", "layers.triton_heads", "layers.triton_norm"]
    lines = [f"import model_executor.{module}" for module in modules]
    script = "\n".join(["import sys", *lines, "print('triton' in sys.modules)"])
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
