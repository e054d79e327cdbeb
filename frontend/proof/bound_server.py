"""`python -m frontend.proof.bound_server LOG ARGUMENTS --parent-fd N`: `tercet ARGUMENTS` that dies with its parent."""

from __future__ import annotations

import os
import sys

from engine_core.wire.child import PARENT_FD_FLAG, bind_to_parent


def enter() -> list[str]:
    """Bind the process to its parent and send its output to LOG; gives ARGUMENTS."""
    log, *words, flag, descriptor = sys.argv[1:]
    assert flag == PARENT_FD_FLAG
    bind_to_parent(int(descriptor))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)
    # What the process list shows is made from this.
    sys.argv = ["tercet", *words]
    return words


def main() -> int:
    """Run the process; gives its exit status."""
    words = enter()
    from frontend.cli.main import main as tercet

    return tercet(words)


if __name__ == "__main__":
    sys.exit(main())
