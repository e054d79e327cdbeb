"""Server-sent events: one `data:` line an event, comments in silence, and a limit on clients that do not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct
from starlette.types import Send

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
# How long one event may wait for a client that does not read.
STALL_S: Final = 60.0
TICK_S: Final = 1.0

# JSON may hold these as they are, but readers that split lines as Unicode does would cut an event in two.
LINE_ENDS: Final = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))

_encoder: Final = msgspec.json.Encoder()


def event(data: Struct) -> bytes:
    """One event whose JSON holds no line end of any kind.

    UTF-8 of one character never stands inside that of another, and JSON has non-ASCII bytes in its texts only, so the
    replacement touches nothing else.
    """
    text = _encoder.encode(data)
    if not text.isascii():
        for raw, escaped in LINE_ENDS:
            text = text.replace(raw, escaped)
    return b"data: " + text + b"\n\n"


class EventWriter:
    """Writes events to one client.

    Args:
        send: of ASGI.
        ping_s: a comment goes out after so many seconds without an event; 0: never.
        clock: seconds, monotonic.
    """

    def __init__(self, send: Send, ping_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._ping_s = ping_s
        self._clock = clock
        self._writing_since: float | None = None
        self._last = clock()
        self.started = False
        self._ended = False

    async def start(self, headers: dict[str, str]) -> None:
        """Send status 200 and the headers."""
        fixed = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        raw = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in (fixed | headers).items()]
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, data: bytes) -> None:
        """Send the bytes of whole events; waits while the client does not read."""
        self._writing_since = self._clock()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing_since = None
        self._last = self._clock()

    async def end(self, data: bytes = b"") -> None:
        """Send the last bytes and end the answer."""
        self._ended = True
        self._writing_since = self._clock()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        self._writing_since = None

    async def attend(self, on_stall: Callable[[], None], on_tick: Callable[[], None]) -> None:
        """Until cancelled: look after the stream every TICK_S."""
        while True:
            await asyncio.sleep(min(TICK_S, self._ping_s or TICK_S))
            on_tick()
            if await self.tick():
                on_stall()
                return

    async def tick(self) -> bool:
        """Send a comment where there was silence for long; whether a write has waited longer than STALL_S."""
        now = self._clock()
        if self._writing_since is not None:
            return now - self._writing_since > STALL_S
        if self._ping_s and self.started and not self._ended and now - self._last >= self._ping_s:
            await self.write(PING)
        return False
