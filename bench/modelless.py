"""`python -m bench.modelless LOG serve MODEL_DIR [flags] --parent-fd N`: our server, with an executor without a model.

Frontend, core and both wires are the real ones; tokens come from the tests' executor, so this needs a source tree.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from engine_core.wire.child import PARENT_FD_FLAG, bind_to_parent
from frontend.cli.main import Parser
from frontend.cli.serve import add_parser, configuration, log_to_stderr, say
from frontend.errors import StartError
from frontend.serving import serve

EXECUTOR: Final = "tests.fakes.executor"


def main() -> int:
    """Serve; gives the exit code. Output goes to LOG."""
    log, *words, flag, descriptor = sys.argv[1:]
    assert flag == PARENT_FD_FLAG
    bind_to_parent(int(descriptor))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)
    # What the process list shows is made from this.
    sys.argv = ["tercet", *words]
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
