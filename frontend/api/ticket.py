"""What goes with each HTTP request from its first byte to its log line: its id, and the facts to be logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.api.auth import OPEN_PATHS
from frontend.api.service import new_id, request_id
from frontend.errors import shown

logger = logging.getLogger(__name__)

KEY: Final = "tercet.ticket"
HEADER: Final = b"x-request-id"
# What monitors ask for every few seconds.
UNLOGGED: Final = OPEN_PATHS | {"/metrics"}


@dataclass
class Ticket:
    """One request's.

    Attributes:
        request_id: the client's own where it is short and plain, else made here; it is in every answer's header.
        facts: counts and times for the log; never text of a prompt or an answer.
    """

    request_id: str
    facts: dict[str, object] = field(default_factory=dict)


class Ticketed:
    """Gives every request a ticket, every answer its id, and every request a log line where that is wanted.

    Args:
        app: what is behind.
        log: whether there are log lines.
        clock: seconds, monotonic.
    """

    def __init__(self, app: ASGIApp, *, log: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._log = log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ticket = Ticket(request_id(Headers(scope=scope).get(HEADER.decode()), new_id("req")))
        scope[KEY] = ticket
        began = self._clock()
        status: list[int] = []

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
                message["headers"] = [*message.get("headers", ()), (HEADER, ticket.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        finally:
            if self._log and scope["path"] not in UNLOGGED:
                self._tell(scope, ticket, status[0] if status else 0, self._clock() - began)

    def _tell(self, scope: Scope, ticket: Ticket, status: int, seconds: float) -> None:
        facts: dict[str, object] = {"request_id": ticket.request_id, "method": scope["method"]}
        facts |= {"path": shown(scope["path"]), "status": status, "seconds": round(seconds, 4)}
        logger.info("request ended", extra={"facts": facts | ticket.facts})
