"""One HTTP request whose answer takes time: its body, its client's presence, and its end before time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.api.running import Cuttable, Running
from frontend.api.ticket import KEY, Ticket
from frontend.errors import BodyEncoded, BodyTooLarge, ClientGone, FrontendError, InvalidRequest

T = TypeVar("T")

# ASGI extension of frontend/http_protocol.py: "abort" ends the connection, "reason" says why the server ended it.
CONNECTION: Final = "tercet.connection"
DROP_S: Final = 1.0


class Exchange:
    """A request and the connection it came over.

    Args:
        scope, receive, send: of ASGI.
        running: where the answer is registered while it is made.

    Attributes:
        headers: of the request.
        ticket: its id, and what the log shall tell of it.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, running: Running) -> None:
        self.headers = Headers(scope=scope)
        self.ticket: Ticket = scope[KEY]
        self.send = send
        self._scope = scope
        self._receive = receive
        self._running = running
        self._connection: Mapping[str, Callable[[], Any]] = scope.get("extensions", {}).get(CONNECTION, {})
        self._answer: Cuttable | None = None

    async def body(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            BodyEncoded: it has a content-encoding; nothing of it is read.
            BodyTooLarge: it is, or says it is, larger than `limit` bytes.
            ClientGone: the client left before the end.
        """
        self._check_encoding()
        self._check_length(limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left before the end of the body")
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise BodyTooLarge(limit)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _check_encoding(self) -> None:
        given = ",".join(self.headers.getlist("content-encoding"))
        if any(each.strip().lower() not in ("", "identity") for each in given.split(",")):
            raise BodyEncoded(given)

    def _check_length(self, limit: int) -> None:
        text = self.headers.get("content-length")
        if text is None:
            return
        if not (text.isascii() and text.isdigit()):
            raise InvalidRequest("content-length: not a whole number")
        if int(text) > limit:
            raise BodyTooLarge(limit)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client leaves or the answer is cut.

        Raises:
            ClientGone: the client left.
            FrontendError: the reason of the cut.
        """
        task = asyncio.create_task(work)
        gone = asyncio.create_task(self._gone())
        self._answer = answer = self._running.enter(task)
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                answer.cut(self._departure())
                await asyncio.wait({task})
            if task.cancelled() and answer.reason is not None:
                raise answer.reason
            return task.result()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
            self._running.leave(answer)

    async def respond(self, response: Response) -> None:
        """Send a whole response."""
        await response(self._scope, self._receive, self.send)

    def cut(self, reason: FrontendError) -> None:
        """End the answer that is being made."""
        if self._answer is not None:
            self._answer.cut(reason)

    @property
    def cut_reason(self) -> FrontendError | None:
        """Why the answer was ended before its end, if it was."""
        return None if self._answer is None else self._answer.reason

    async def drop(self) -> None:
        """End the connection at once; what is still to be sent is lost."""
        if "abort" in self._connection:
            self._connection["abort"]()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone(), DROP_S)

    def _departure(self) -> ClientGone:
        reason = self._connection["reason"]() if "reason" in self._connection else None
        return ClientGone("the client left" if reason is None else f"the connection was ended: {reason}")

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
