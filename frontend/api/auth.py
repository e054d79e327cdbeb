"""API keys: every path but the health checks is closed to requests without a valid key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.api.errors import error_response
from frontend.errors import Unauthorized

OPEN_PATHS: Final = frozenset({"/live", "/ready", "/health"})
SCHEME: Final = b"Bearer "


class KeyGuard:
    """Lets requests through that bring a key. It stands before all routing, so that no spelling of a path avoids it.

    Args:
        app: what it guards.
        keys: valid keys; none: everything is let through.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, or answer 401."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._allows(scope["headers"]):
            await self._app(scope, receive, send)
            return
        refusal = Unauthorized("a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        await error_response(refusal)(scope, receive, send)

    def _allows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        if not self._digests:
            return True
        given = [text for name, text in headers if name == b"authorization"]
        if len(given) != 1 or not given[0].startswith(SCHEME):
            return False
        digest = _digest(given[0].removeprefix(SCHEME))
        # All are compared, so that the time tells neither which key is near nor how near.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
