"""The norm kernel as a GPU would get it, without and with a sum; its results are tested in test_triton_norm.py."""

from __future__ import annotations

from collections.abc import Callable


def test_compiles_for_a_hopper_gpu(compiled: Callable[[int, str], list[str]]) -> None:
    lines = [line for line in compiled(90, "few") if "norm_kernel" in line]
    assert [line.startswith("ok ") for line in lines] == [True, True]
