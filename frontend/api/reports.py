"""The reports of the start: over HTTP once the engine is ready, and as files.

`/reports/load` is the executor's own load report, `/reports/kernels` its choice of kernels, `/reports/startup` the
times of the start under the names below.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine_core.wire.client import Ready
from engine_core.wire.reports import PageCacheState, Phase, page_cache_state
from frontend.api.service import RETRY_AFTER_S, Service
from frontend.errors import NotReady

logger = logging.getLogger(__name__)

# What is recorded, and the phases of the start that make it up. A model runs in one process: nothing is distributed.
TIMES: Final[Mapping[str, tuple[Phase, ...]]] = {
    "start_up": ("start",),
    "distributed_init": (),
    "planning": ("plan",),
    "checkpoint_io": ("load",),
    "backend_preparation": ("build", "pack", "kv_cache"),
    "graph_capture": ("capture",),
    "first_execution": ("warm_up",),
    "warm_execution": ("warm_run",),
}


class StartupRecord(Struct, frozen=True):
    """One start of the executor.

    Attributes:
        model: the folder; revision: of the checkpoint.
        dtype: of the weights as computed with.
        epoch: incarnation of the executor.
        layer_map: source index of each runtime layer.
        seconds: separate times, by the names of TIMES; total: their sum.
        page_cache: whether the weights came from memory or from the disk.
        page_cache_share: of the bytes read, how much was in memory before; None: unknown.
    """

    model: str
    revision: str
    dtype: str
    epoch: int
    layer_map: list[int]
    seconds: dict[str, float]
    total: float
    page_cache: PageCacheState
    page_cache_share: float | None


def startup_record(ready: Ready) -> StartupRecord:
    """The record of the start that ended in this message."""
    seconds = {name: sum((ready.startup_s.get(phase, 0.0) for phase in phases), 0.0) for name, phases in TIMES.items()}
    return StartupRecord(
        model=ready.load.model,
        revision=ready.load.revision,
        dtype=ready.model.dtype,
        epoch=ready.epoch,
        layer_map=ready.load.layer_map,
        seconds=seconds,
        total=sum(seconds.values()),
        page_cache=page_cache_state(ready.load.page_cache),
        page_cache_share=ready.load.page_cache,
    )


# By name, as they stand in paths and file names.
REPORTS: Final[Mapping[str, Callable[[Ready], object]]] = {
    "load": lambda ready: ready.load,
    "startup": startup_record,
    "kernels": lambda ready: [*ready.kernels, *([] if ready.graphs is None else [ready.graphs])],
}


class Reports:
    """The endpoints.

    Args:
        service: the server's parts.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """One for each report."""
        return [Route(f"/reports/{name}", self._endpoint(make)) for name, make in REPORTS.items()]

    def _endpoint(self, make: Callable[[Ready], object]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(_: Request) -> Response:
            client = self._service.engine.client
            ready = None if client is None else client.ready
            if ready is None:
                raise NotReady(*self._service.state(), RETRY_AFTER_S)
            return Response(msgspec.json.encode(make(ready)), media_type="application/json")

        return answer


def write_reports(folder: Path, ready: Ready) -> None:
    """Write each report as a file; a reader sees the old one or the new one, never a part. A fault is logged."""
    for name, make in REPORTS.items():
        path = folder / f"{name}.json"
        part = folder / f".{name}.json.{os.getpid()}"
        try:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(make(ready))) + b"\n")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            logger.error("--report-dir: %s: %s", path, error.strerror or error)  # noqa: TRY400 - the message says all
