"""Errors to HTTP: one table from the error tree to status and type, and the body in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct
from starlette.responses import Response

from frontend import errors
from frontend.errors import FrontendError

INVALID: Final = "invalid_request_error"
SERVER: Final = "server_error"
UNAVAILABLE: Final = "service_unavailable_error"
CLIENT_CLOSED: Final = 499

# The first class that fits decides, so a class stands before its bases.
TABLE: Final[tuple[tuple[type[FrontendError], int, str], ...]] = (
    (errors.ModelUnknown, 404, INVALID),
    (errors.RouteUnknown, 404, INVALID),
    (errors.MethodUnknown, 405, INVALID),
    (errors.Unauthorized, 401, "authentication_error"),
    (errors.BodyTooLarge, 413, INVALID),
    (errors.BodyEncoded, 415, INVALID),
    (errors.NotReady, 503, UNAVAILABLE),
    (errors.ServerStopping, 503, UNAVAILABLE),
    (errors.InvalidRequest, 400, INVALID),
    (errors.ContextTooLong, 400, INVALID),
    (errors.TextOverload, 429, "rate_limit_error"),
    (errors.TemplateError, 400, INVALID),
    (errors.EngineDead, 503, UNAVAILABLE),
    (errors.EngineTimeout, 503, UNAVAILABLE),
    (errors.GenerationFailed, 500, SERVER),
    (errors.BacklogExceeded, CLIENT_CLOSED, INVALID),
    (errors.ClientGone, CLIENT_CLOSED, INVALID),
)

# Rejections by the core's code: status, type, and the code that clients know.
REJECTIONS: Final[Mapping[str, tuple[int, str, str]]] = {
    "invalid": (400, INVALID, "invalid"),
    "context_length": (400, INVALID, "context_length_exceeded"),
    "never_fits": (400, INVALID, "never_fits"),
    "duplicate_id": (500, SERVER, "duplicate_id"),
    "queue_full": (429, "rate_limit_error", "queue_full"),
    "not_ready": (503, UNAVAILABLE, "not_ready"),
    "draining": (503, UNAVAILABLE, "shutting_down"),
}

CLOSE: Final = {"connection": "close"}


class ErrorBody(Struct, frozen=True):
    """The error itself; `code` is text or null, never a number."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, frozen=True):
    """What a client gets instead of an answer."""

    error: ErrorBody


def describe(error: FrontendError) -> tuple[int, ErrorAnswer]:
    """Status and body of an error."""
    if isinstance(error, errors.RequestRejected):
        status, kind, code = REJECTIONS[error.reject_code]
        return status, ErrorAnswer(ErrorBody(error.message, kind, error.param, code))
    status, kind = next(((status, kind) for each, status, kind in TABLE if isinstance(error, each)), (500, SERVER))
    return status, ErrorAnswer(ErrorBody(str(error), kind, getattr(error, "param", None), getattr(error, "code", None)))


def error_response(error: FrontendError) -> Response:
    """The error as an HTTP answer."""
    status, answer = describe(error)
    return Response(
        msgspec.json.encode(answer), status_code=status, headers=_headers(error), media_type="application/json"
    )


def _headers(error: FrontendError) -> dict[str, str]:
    headers: dict[str, str] = {}
    wait = getattr(error, "retry_after_s", None)
    if wait is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait)))
    if isinstance(error, errors.Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="tercet"'
    if isinstance(error, errors.BodyEncoded):
        headers["accept-encoding"] = "identity"
    if isinstance(error, (errors.BodyTooLarge, errors.ServerStopping)):
        headers |= CLOSE
    return headers
