"""The engine core process: `python -m engine_core --config FILE --socket PATH --runtime-dir DIR --parent-fd N`.

Exit status: 0 ended on request; 2 bad usage or configuration; 3 the start was refused; 4 failed; 75 the parent is gone.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_core.wire.child import bind_to_parent
from engine_core.wire.logs import log_lines

log = logging.getLogger("engine_core")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engine core; gives the exit status."""
    options = _parser().parse_args(arguments)
    # A terminal's Ctrl-C is for the process on top, which ends this one by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Until the event loop takes it over.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options.parent_fd is not None:
        bind_to_parent(options.parent_fd)
    # The configuration says in which form; until it is read, lines are for people.
    log_lines("core", "text")
    # Only now, tied to the parent, what takes time to import.
    from engine_core.process import Paths, serve

    paths = Paths(
        config=options.config, client_socket=options.socket, runtime_dir=options.runtime_dir, trace=options.trace_file
    )
    return serve(paths, options.executor_module, options.incarnation)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine_core", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="file with the engine's configuration")
    parser.add_argument("--socket", type=Path, required=True, help="where clients connect")
    parser.add_argument("--runtime-dir", type=Path, required=True, help="private directory for the executor's socket")
    parser.add_argument("--parent-fd", type=int, help="end of a pipe that the parent holds open")
    parser.add_argument("--incarnation", type=int, default=1, help="how many cores there have been, with this one")
    parser.add_argument("--trace-file", type=Path, help="write a timeline of the last steps here at the end")
    parser.add_argument("--executor-module", default="model_executor", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
