"""Puts Triton into its interpreter, which runs kernels on CPU.

Triton decides this when it is imported, so tests/conftest.py imports this module before anything can import triton.
The environment is left as it was: child processes compile their kernels.

The interpreter cuts off digits where it makes bfloat16 of float32. A GPU rounds to the nearest, and so it does here.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

VARIABLE = "TRITON_INTERPRET"


def enter() -> None:
    """Import triton for the interpreter; nothing happens when that is done."""
    if "triton" not in sys.modules:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "1"
        import triton

        triton.knobs.propagate_env = False
        triton.knobs.runtime.interpret = True
        triton.knobs.propagate_env = True
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    import triton

    assert triton.knobs.runtime.interpret, "triton was imported before tests.model_executor.interpreted"
    _round_bfloat16()


def _round_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.cast_impl

    def cast(builder: InterpreterBuilder, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return plain(builder, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return TensorHandle(np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16), target.scalar)

    InterpreterBuilder.cast_impl = cast


enter()
