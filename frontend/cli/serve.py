"""`tercet serve MODEL_DIR`: flags to a configuration, and the configuration to a running server."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from frontend.cli.options import add_options, build, merged, options
from frontend.cli.version import package_version
from frontend.config import MASK, ServeConfig, printable, read_values
from frontend.errors import UsageError

API_KEY_VARIABLE = "TERCET_API_KEY"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="tercet serve MODEL_DIR [flags]",
        description="Serve a model over HTTP. Exit codes: 0 ended by SIGTERM or Ctrl-C; 2 a flag, a value or the "
        "address is wrong; 3 the model or the configuration cannot be honoured; 4 the engine failed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="JSON file in the form that --print-config prints; flags override its values"
    )
    parser.add_argument("--print-config", action="store_true", help="print the validated configuration and end")
    add_options(parser, options(ServeConfig), positional="model")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; gives the exit code."""
    config = configuration(args, os.environ)
    if args.print_config:
        print(printable(config))
        return 0
    from frontend.serving import serve  # the server's imports are not needed to print a configuration

    log_to_stderr()
    return serve(config, say, version=package_version())


def say(line: str) -> None:
    """Print a line for the operator at once."""
    print(line, flush=True)


def log_to_stderr() -> None:
    """One line for each record; the HTTP library's own only from warnings on."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def configuration(args: argparse.Namespace, environment: Mapping[str, str]) -> ServeConfig:
    """The validated configuration out of flags, the file of --config, and the API keys of the environment.

    Raises:
        UsageError: a value is wrong, or there is no model.
    """
    base = read_values(Path(args.config)) if args.config else {}
    given: dict[tuple[str, ...], object] = {
        tuple(name.split(".")): value for name, value in vars(args).items() if "." in name
    }
    key = environment.get(API_KEY_VARIABLE)
    if key:
        given["http", "api_key"] = [*_keys(given), key]
    config = build(ServeConfig, merged(base, given), f"--config {args.config}" if args.config else "configuration")
    if MASK in config.http.api_key:
        raise UsageError(f"--api-key: {MASK} stands for a masked key in a printed configuration and is no key")
    if not config.engine.model.model:
        raise UsageError("tercet serve: MODEL_DIR is missing: name the folder of the model")
    return _resolved(config)


def _keys(given: Mapping[tuple[str, ...], object]) -> list[str]:
    keys = given.get(("http", "api_key"), [])
    assert isinstance(keys, list)
    return keys


def _resolved(config: ServeConfig) -> ServeConfig:
    # The engine core may have another working directory than the user's shell; names stay as given.
    names = config.http.served_model_name or (config.engine.model.model,)
    path = str(Path(config.engine.model.model).expanduser().absolute())
    replace = msgspec.structs.replace
    model = replace(config.engine.model, model=path)
    http = replace(config.http, served_model_name=names)
    return replace(config, http=http, engine=replace(config.engine, model=model))
