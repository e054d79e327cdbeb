"""One streamed completion over a plain socket, with the time of every event.

Written on asyncio streams so that the client costs little of the machine it shares with the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class StreamFailed(Exception):
    """The server answered with an error, or the stream broke off."""


@dataclass
class Streamed:
    """What a client saw of one request; times are seconds of a monotonic clock.

    Attributes:
        started: before the request was sent.
        arrivals: of each event that carried text or tokens.
        prompt_tokens, output_tokens: from the usage chunk.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first event."""
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring events."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def stream_completion(url: str, body: dict[str, Any], deadline_s: float) -> Streamed:
    """POST /v1/completions with streaming and usage.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        body: of the request, without the streaming fields.
        deadline_s: for the whole answer.

    Raises:
        StreamFailed: another status than 200, an error event, or no [DONE].
        TimeoutError: the deadline has passed.
    """
    async with asyncio.timeout(deadline_s):
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
            head += f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
            seen = Streamed(time.monotonic())
            writer.write(head.encode() + payload)
            await _read(reader, seen)
            return seen
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader, seen: Streamed) -> None:
    status = await reader.readline()
    if b" 200 " not in status:
        raise StreamFailed((status + await reader.read()).decode(errors="replace"))
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            raise StreamFailed(str(event["error"]))
        if event.get("usage"):
            seen.prompt_tokens = event["usage"]["prompt_tokens"]
            seen.output_tokens = event["usage"]["completion_tokens"]
        if event["choices"]:
            seen.arrivals.append(time.monotonic())
    raise StreamFailed("the stream ended without [DONE]")
