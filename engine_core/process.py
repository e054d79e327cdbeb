"""The engine core as a process: its sockets, its event loop and its exit status."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, NamedTuple

import uvloop
import zmq
import zmq.asyncio

from engine_core.clients import Clients
from engine_core.ending import exit_status
from engine_core.engine import Engine
from engine_core.executor_client import ExecutorClient
from engine_core.timeline import Timeline
from engine_core.wire.client import Fatal
from engine_core.wire.config import ConfigInvalid, EngineConfig, read_config
from engine_core.wire.errors import SocketPathTooLong
from engine_core.wire.logs import log_lines
from engine_core.wire.transport import EXECUTOR_SOCKET, bind_router

log = logging.getLogger(__name__)

EXIT_USAGE: Final = 2
# Time for the last messages to clients to leave.
LINGER_MS: Final = 500


class Paths(NamedTuple):
    """Files of one engine core.

    Attributes:
        config: the configuration.
        client_socket: where clients connect.
        runtime_dir: private directory; the executor's socket is made in it.
        trace: the timeline, if one is wanted.
    """

    config: Path
    client_socket: Path
    runtime_dir: Path
    trace: Path | None


def serve(paths: Paths, executor_module: str, incarnation: int) -> int:
    """Run an engine core until it ends; gives the exit status."""
    reason: Exception
    try:
        config = read_config(paths.config)
        log_lines("core", config.log.log_format)
        timeline = None if paths.trace is None else Timeline(paths.trace)
        ending = uvloop.run(_serve(config, paths, executor_module, incarnation, timeline))
    except (ConfigInvalid, SocketPathTooLong, OSError, zmq.ZMQError) as error:
        reason = error
    else:
        return exit_status(ending)
    log.error("engine core cannot run: %s", reason)
    return EXIT_USAGE


async def _serve(
    config: EngineConfig, paths: Paths, executor_module: str, incarnation: int, timeline: Timeline | None
) -> Fatal:
    context = zmq.asyncio.Context()
    executor_socket = paths.runtime_dir / EXECUTOR_SOCKET
    try:
        clients = Clients(bind_router(context, paths.client_socket))
        executor = ExecutorClient(
            bind_router(context, executor_socket),
            config=config,
            config_path=paths.config,
            socket_path=executor_socket,
            module=executor_module,
        )
        ending = await Engine(config, clients, executor, incarnation=incarnation, timeline=timeline).run()
        clients.close(LINGER_MS)
        executor.close()
        if timeline is not None:
            timeline.write()
        return ending
    finally:
        # Closes what is still open; waits for what lingers.
        context.destroy()
        for path in (paths.client_socket, executor_socket):
            path.unlink(missing_ok=True)
