"""The tiles as GPUs get them, inside the kernels; what they compute is tested in tests/model_executor/attention. Beside
them all other kernels, which keep the same rules.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_every_shape_fits(compiled: Callable[[int, str], list[str]], capability: int) -> None:
    lines = compiled(capability, "all")
    # Two shapes share their join.
    assert len(lines) == 49
    assert [line for line in lines if not line.startswith("ok ")] == []


@pytest.mark.slow
def test_all_that_the_check_of_a_gpu_launches_compiles(compiled: Callable[[int, str], list[str]]) -> None:
    lines = compiled(90, "check")
    assert {line.split()[1] for line in lines} == {
        *("decode_kernel:", "join_kernel:", "prefill_kernel:", "norm_kernel:", "heads_kernel:", "gated_kernel:")
    }
    assert [line for line in lines if not line.startswith("ok ")] == []


@pytest.mark.slow
def test_no_shape_spills_registers_on_hopper(compiled: Callable[[int, str], list[str]]) -> None:
    assert [line for line in compiled(90, "all") if not line.endswith(", 0 of stack")] == []


def test_registers_hold_the_tiles_on_hopper(compiled: Callable[[int, str], list[str]]) -> None:
    assert [line for line in compiled(90, "few") if not line.endswith(", 0 of stack")] == []
