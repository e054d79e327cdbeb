"""The heads kernel as a GPU would get it; what it does is tested in tests/model_executor/layers."""

from __future__ import annotations

from collections.abc import Callable


def test_compiles_for_a_hopper_gpu(compiled: Callable[[int, str], list[str]]) -> None:
    lines = [line for line in compiled(90, "few") if "heads_kernel" in line]
    assert [line.startswith("ok ") for line in lines] == [True]
