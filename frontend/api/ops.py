"""Endpoints for operators: health, models, metrics, version, invariants."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine_core.wire.client import EngineState
from frontend.api.service import RETRY_AFTER_S, Service
from frontend.errors import ModelUnknown, NotReady
from frontend.metrics import CONTENT_TYPE

INSPECT_DEADLINE_S: Final = 5.0


class Health(Struct, frozen=True):
    """State of the server; `reason` where it is not "ready"."""

    status: EngineState
    reason: str = ""


class Alive(Struct, frozen=True):
    """The process is up."""

    status: Literal["alive"] = "alive"


class ModelCard(Struct, frozen=True, kw_only=True):
    """One name of the served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["tercet"] = "tercet"
    max_model_len: int | None


class ModelList(Struct, frozen=True, kw_only=True):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(Struct, frozen=True):
    """The server's version."""

    version: str


class Ops:
    """These endpoints.

    Args:
        service: the server's parts.
        version: of the package.
    """

    def __init__(self, service: Service, version: str) -> None:
        self._service = service
        self._version = version

    def routes(self) -> list[Route]:
        """All of them; the one for debugging only where it was asked for."""
        routes = [
            Route("/live", self.live),
            Route("/ready", self.ready),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
        ]
        if self._service.options.debug_endpoints:
            routes.append(Route("/debug/invariants", self.invariants))
        return routes

    async def live(self, _: Request) -> Response:
        """200 while the process answers at all."""
        return _json(Alive())

    async def ready(self, _: Request) -> Response:
        """200 while requests are taken."""
        return self._state()

    async def health(self, _: Request) -> Response:
        """200 while requests are taken and the engine makes progress; no request is ever sent to find out.

        The states, and how soon each shows: frontend/health.py.
        """
        return self._state()

    def _state(self) -> Response:
        state, reason = self._service.state()
        if state == "ready":
            return _json(Health(state))
        response = _json(Health(state, reason), 503)
        response.headers["retry-after"] = f"{RETRY_AFTER_S:.0f}"
        return response

    async def metrics(self, _: Request) -> Response:
        """All counters as Prometheus text."""
        return Response(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def version(self, _: Request) -> Response:
        """The version."""
        return _json(Version(self._version))

    async def models(self, _: Request) -> Response:
        """All names of the model."""
        return _json(ModelList(data=[self._card(name) for name in self._service.names]))

    async def model(self, request: Request) -> Response:
        """One name of the model.

        Raises:
            ModelUnknown: it is none.
        """
        name = request.path_params["name"]
        if name not in self._service.names:
            raise ModelUnknown(name, ", ".join(self._service.names))
        return _json(self._card(name))

    def _card(self, name: str) -> ModelCard:
        client = self._service.engine.client
        model = None if client is None else client.model
        return ModelCard(
            id=name, created=self._service.started, max_model_len=None if model is None else model.max_model_len
        )

    async def invariants(self, _: Request) -> Response:
        """The engine's ledger and violated invariants, checked now; 500 when there are any.

        Raises:
            NotReady: there is no engine.
        """
        client = self._service.engine.client
        if client is None:
            raise NotReady(*self._service.state(), RETRY_AFTER_S)
        inspection = await client.inspect(INSPECT_DEADLINE_S)
        ledger = {name: getattr(inspection, name) for name in ("free", "cached", "owned", "total", "violations")}
        return _json(ledger, 500 if inspection.violations else 200)


def _json(data: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status_code=status, media_type="application/json")
