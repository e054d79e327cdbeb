"""`python -m model_executor --config PATH --socket PATH --epoch N --parent-fd FD`: the executor process.

Exit status: 0 clean end, 2 bad usage or configuration, 3 start refused, 4 failed, 75 orphaned.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from engine_core.wire.child import PARENT_FD_FLAG, bind_to_parent

EXIT_USAGE = 2


def main() -> int:
    """Run the process; gives its exit status."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m model_executor", description="the executor, started by the core")
    parser.add_argument("--config", type=Path, required=True, help="configuration written by the frontend")
    parser.add_argument("--socket", type=Path, required=True, help="socket of the core")
    parser.add_argument("--epoch", type=int, required=True, help="incarnation of the executor")
    parser.add_argument(PARENT_FD_FLAG, type=int, required=True, dest="parent_fd", help="inherited pipe of the parent")
    arguments = parser.parse_args()
    bind_to_parent(arguments.parent_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    from engine_core.wire.config import ConfigInvalid, read_config
    from engine_core.wire.logs import log_lines

    log_lines("executor", "text")
    from model_executor.worker import work

    try:
        config = read_config(arguments.config)
    except ConfigInvalid as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - the message says all
        return EXIT_USAGE
    log_lines("executor", config.log.log_format)
    try:
        return work(config, arguments.socket, arguments.epoch, began)
    finally:
        # The status stands: a core that ends this process now must not turn it, nor break into the interpreter's end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _leave(_number: int, _frame: FrameType | None) -> None:
    """End now, with the sockets closed on the way out; a second signal must not cut that short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
