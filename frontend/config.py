"""The configuration of `tercet serve`: each option stands here, or in the engine's configuration, once.

The command line, its help and the printed configuration are made from these Structs (frontend/cli/options.py). A
configuration is complete and validated before anything starts, and never changes after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from engine_core.wire.config import EngineConfig
from frontend.errors import UsageError

MASK: Final = "***"
API_KEY_VARIABLE: Final = "TERCET_API_KEY"


class HttpOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP endpoint."""

    host: Annotated[
        str, Meta(min_length=1, description="address to listen on; 0.0.0.0 or :: opens the server to the network")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: the system chooses, the log says")] = (
        8000
    )
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="name that requests call the model by (repeatable; default: the folder as given)"),
    ] = ()
    api_key: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="key that requests must bring as a bearer token (repeatable; also from TERCET_API_KEY)"),
    ] = ()
    api_key_file: Annotated[str | None, Meta(description="file with further keys, one a line; read once")] = None
    shutdown_timeout: Annotated[
        float, Meta(ge=0, le=86400, description="seconds that running answers get after SIGTERM or Ctrl-C")
    ] = 30.0
    max_body_bytes: Annotated[
        int,
        Meta(ge=1024, le=2**31, description="bytes of one request body, in memory up to 3 times; more is answered 413"),
    ] = 33_554_432
    max_stream_backlog_bytes: Annotated[
        int, Meta(ge=1024, le=2**31, description="bytes kept for one answer whose client does not read; then it is cut")
    ] = 4_194_304
    sse_ping_interval: Annotated[
        float, Meta(ge=0, le=3600, description="seconds of silence after which a stream gets a comment line; 0: never")
    ] = 15.0
    chat_template: Annotated[
        str | None, Meta(description="file with the chat template, instead of the model folder's")
    ] = None
    strict_fields: Annotated[bool, Meta(description="answer 400 to request fields that the server does not know")] = (
        False
    )
    enable_log_requests: Annotated[
        bool, Meta(description="one log line for each request: counts and times, never text")
    ] = False
    debug_endpoints: Annotated[bool, Meta(description="serve GET /debug/invariants")] = False


class ClientOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Python clients."""

    client_socket: Annotated[
        str | None, Meta(description="path of the unix socket for Python clients; default: in a private directory")
    ] = None


class ReportOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Reports of start and steps."""

    report_dir: Annotated[
        str | None,
        Meta(description="folder for load.json, startup.json and kernels.json; also at GET /reports/..."),
    ] = None
    trace_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="file for a timeline of the latest steps, written when the engine ends; trace viewers such as "
            "Perfetto open it",
        ),
    ] = None


class ServeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """All that `tercet serve` is told."""

    version: Literal[1] = 1
    http: HttpOptions = HttpOptions()
    client: ClientOptions = ClientOptions()
    reports: ReportOptions = ReportOptions()
    engine: EngineConfig = EngineConfig()


def served_names(config: ServeConfig) -> tuple[str, ...]:
    """The names requests may call the model by; the first one stands in answers."""
    return config.http.served_model_name or (config.engine.model.model,)


def printable(config: ServeConfig) -> str:
    """The configuration as JSON, API keys masked."""
    masked = msgspec.structs.replace(config.http, api_key=tuple(MASK for _ in config.http.api_key))
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(config, http=masked))).decode()


def read_keys(path: Path) -> tuple[str, ...]:
    """The API keys in a file, one a line; empty lines and blanks around a key do not count.

    Raises:
        UsageError: the file cannot be read, or holds no key: the server would stand open.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or 'is no UTF-8 text'}") from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise UsageError(f"--api-key-file {path}: holds no key")
    return keys


def read_values(path: Path) -> dict[str, object]:
    """The values of a configuration file: a JSON object in the form that --print-config prints.

    Raises:
        UsageError: the file cannot be read or holds no JSON object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path}: {error}") from error
