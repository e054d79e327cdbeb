"""Puts Triton into its interpreter, which runs kernels on CPU.

Triton decides this when it is imported, so tests/conftest.py imports this module before anything can import triton.
The environment is left as it was: child processes compile their kernels.
"""

from __future__ import annotations

import os
import sys

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


enter()
