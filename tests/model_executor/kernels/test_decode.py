"""The decode kernels as a GPU would get them; what they compute is tested in tests/model_executor/attention."""

from __future__ import annotations

from collections.abc import Callable


def test_compiles_for_a_hopper_gpu(compiled: Callable[[int, str], list[str]]) -> None:
    lines = [line for line in compiled(90, "few") if "decode_kernel" in line or "join_kernel" in line]
    assert [line.startswith("ok ") for line in lines] == [True, True]
