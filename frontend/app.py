"""The HTTP application: routes to endpoints, errors to answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from frontend.api.auth import KeyGuard
from frontend.api.chat import Chat
from frontend.api.completions import Completions
from frontend.api.errors import CLOSE, error_response
from frontend.api.ops import Ops
from frontend.api.reports import Reports
from frontend.api.service import Service
from frontend.api.texts import Texts
from frontend.api.ticket import Ticketed
from frontend.errors import FrontendError, MethodUnknown, RequestError, RouteUnknown, shown

logger = logging.getLogger(__name__)

Handler = Callable[[Request, Exception], Awaitable[Response]]


class InternalError(RequestError):
    """A fault of this server; the log tells more."""


def create_app(service: Service, texts: Texts, version: str) -> ASGIApp:
    """The application of one server."""
    routes = [
        Route("/v1/completions", Completions(service, texts), methods=["POST"]),
        Route("/v1/chat/completions", Chat(service, texts), methods=["POST"]),
        *Ops(service, version).routes(),
        *Reports(service).routes(),
    ]
    handlers: Mapping[Any, Any] = {
        FrontendError: _on_error,
        HTTPException: _on_route_error,
        Exception: _on_fault,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    # A path with a slash too many is no other path: no redirects.
    app.router.redirect_slashes = False
    return Ticketed(KeyGuard(app, service.options.api_key), log=service.options.enable_log_requests)


async def _on_error(_: Request, error: Exception) -> Response:
    return error_response(cast("FrontendError", error))


async def _on_route_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {shown(request.url.path)}"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response = error_response(MethodUnknown(f"{place}: no such method here"))
        response.headers.update(error.headers or {})
        return response
    return error_response(RouteUnknown(f"{place}: no such path"))


async def _on_fault(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    # The error goes on to the HTTP server, which closes the connection.
    response = error_response(InternalError("the server failed on this request; its log says why", code="internal"))
    response.headers.update(CLOSE)
    return response
