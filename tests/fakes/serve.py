"""`python -m tests.fakes.serve MODEL_DIR [flags]` is `tercet serve` over the fake engine core, as real processes."""

from __future__ import annotations

import os
import sys

from frontend.cli.main import Parser
from frontend.cli.serve import add_parser, configuration, log_to_stderr, say
from frontend.errors import StartError
from frontend.serving import serve


def main() -> int:
    """Serve; gives the exit code."""
    parser = Parser()
    add_parser(parser.add_subparsers(dest="command", parser_class=Parser))
    try:
        config = configuration(parser.parse_args(["serve", *sys.argv[1:]]), os.environ)
        log_to_stderr(config.engine.log.log_format)
        return serve(config, say, module=("-m", "tests.fakes.core"))
    except StartError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
