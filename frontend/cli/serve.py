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

from engine_core.wire.logs import LogFormat, log_lines
from frontend.cli.options import add_options, build, merged, options
from frontend.cli.version import package_version
from frontend.config import API_KEY_VARIABLE, MASK, ServeConfig, printable, read_keys, read_values
from frontend.errors import UsageError
from frontend.tokenizer.pool import text_threads


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

    log_to_stderr(config.engine.log.log_format)
    return leave(serve(config, say, version=package_version()))


def leave(status: int) -> int:
    """End with this exit status at once where a text is still worked on, which can take long; else give it back."""
    if text_threads():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def say(line: str) -> None:
    """Print a line for the operator at once."""
    print(line, flush=True)


def log_to_stderr(form: LogFormat = "text") -> None:
    """One line for each record; of the HTTP library errors only: what clients send wrong is counted, not told.

    What an unexpected error says may quote a request, so its kind and place are all that is written.
    """
    log_lines("frontend", form, values=False)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def configuration(args: argparse.Namespace, environment: Mapping[str, str]) -> ServeConfig:
    """The validated configuration out of flags, the file of --config, and the API keys of their file and environment.

    Raises:
        UsageError: a value is wrong, or there is no model.
    """
    base = read_values(Path(args.config)) if args.config else {}
    given: dict[tuple[str, ...], object] = {
        tuple(name.split(".")): value for name, value in vars(args).items() if "." in name
    }
    source = f"--config {args.config}" if args.config else "configuration"
    config = _with_keys(build(ServeConfig, merged(base, given), source), environment.get(API_KEY_VARIABLE, ""))
    if not config.engine.model.model:
        raise UsageError("tercet serve: MODEL_DIR is missing: name the folder of the model")
    return _resolved(config)


def _with_keys(config: ServeConfig, from_environment: str) -> ServeConfig:
    http = config.http
    from_file = read_keys(Path(http.api_key_file)) if http.api_key_file is not None else ()
    keys = (*http.api_key, *from_file, *([from_environment] if from_environment else []))
    if MASK in keys:
        raise UsageError(f"--api-key: {MASK} stands for a masked key in a printed configuration and is no key")
    return msgspec.structs.replace(config, http=msgspec.structs.replace(http, api_key=tuple(dict.fromkeys(keys))))


def _resolved(config: ServeConfig) -> ServeConfig:
    # The engine core may have another working directory than the user's shell; names stay as given.
    names = config.http.served_model_name or (config.engine.model.model,)
    path = str(Path(config.engine.model.model).expanduser().absolute())
    replace = msgspec.structs.replace
    model = replace(config.engine.model, model=path)
    http = replace(config.http, served_model_name=names)
    reports = config.reports
    if reports.trace_file is not None:
        reports = replace(reports, trace_file=str(Path(reports.trace_file).expanduser().absolute()))
    return replace(config, http=http, reports=reports, engine=replace(config.engine, model=model))
