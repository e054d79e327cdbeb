"""`python -m tests.fault.serve MODEL_DIR [flags]` is `tercet serve` with the fake executor below the real core."""

from __future__ import annotations

import os
import sys

from frontend.cli.main import Parser
from frontend.cli.serve import add_parser, configuration, log_to_stderr, say
from frontend.errors import StartError
from frontend.serving import serve
from tests.fakes.core_process import FAKE_EXECUTOR

CORE = ("-m", "engine_core", "--executor-module", FAKE_EXECUTOR)


def main() -> int:
    """Serve; gives the exit code."""
    parser = Parser()
    add_parser(parser.add_subparsers(dest="command", parser_class=Parser))
    try:
        config = configuration(parser.parse_args(["serve", *sys.argv[1:]]), os.environ)
        log_to_stderr(config.engine.log.log_format)
        return serve(config, say, module=CORE)
    except StartError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
