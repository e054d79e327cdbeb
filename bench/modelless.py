"""`python -m bench.modelless LOG serve MODEL_DIR [flags] --parent-fd N`: our server, with an executor without a model.

Frontend, core and both wires are the real ones; tokens come from the tests' executor, so this needs a source tree.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from frontend.cli.main import Parser
from frontend.cli.serve import add_parser, configuration, log_to_stderr, say
from frontend.errors import StartError
from frontend.proof.bound_server import enter
from frontend.serving import serve

EXECUTOR: Final = "tests.fakes.executor"


def main() -> int:
    """Serve; gives the exit code. Output goes to LOG."""
    words = enter()
    parser = Parser()
    add_parser(parser.add_subparsers(dest="command", parser_class=Parser))
    try:
        config = configuration(parser.parse_args(words), os.environ)
        log_to_stderr(config.engine.log.log_format)
        return serve(config, say, module=("-m", "engine_core", "--executor-module", EXECUTOR))
    except StartError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
