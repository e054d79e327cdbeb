"""A streaming client that costs little of the machine it shares with the server.

While an answer comes in, its lines are only kept with their time; what they say is read when it has ended.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec import Struct

from bench.answer import Answer
from bench.errors import UsageError

MOST_ERROR_BYTES: Final = 2000


class _Delta(Struct):
    content: str | None = None
    role: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


class Connection(asyncio.Protocol):
    """One connection, with one request at a time.

    Attributes:
        closed: it takes no further request.
    """

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._rest = b""
        self._lines: list[tuple[float, bytes]] = []
        self._other = b""
        self._done: asyncio.Future[None] | None = None

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Send the bytes of a request and fill in its answer.

        Raises:
            OSError: the connection broke.
        """
        assert self._transport is not None, "connected"
        self._parser = httptools.HttpResponseParser(self)
        self._lines, self._rest, self._other = [], b"", b""
        self._done = asyncio.get_running_loop().create_future()
        answer.sent = time.perf_counter()
        self._transport.write(request)
        await self._done
        answer.ended = self._now
        if self._parser.get_status_code() != 200:
            answer.error = f"status {self._parser.get_status_code()}: {self._other.decode(errors='replace')}"
        else:
            read_events(self._lines, answer)

    def close(self) -> None:
        """Let go."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came; they are parsed at once, under one time."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closed, or the connection broke."""
        self.closed = True
        self._fail(ConnectionError(f"the connection was closed before the answer ended: {exc or 'no reason'}"))

    # httptools

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        now = self._now
        for line in lines:
            if line.startswith(b"data:"):
                self._lines.append((now, line))
        if not self._lines and len(self._other) < MOST_ERROR_BYTES:
            self._other += body

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self.closed |= not self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: OSError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


def read_events(lines: list[tuple[float, bytes]], answer: Answer) -> None:
    """Fill in arrivals, counts and error from the lines of a stream.

    An event counts as a part of the answer when it has text, or when it is neither a chat's opening nor the end.
    """
    arrivals, finished, counted = [], False, False
    for when, line in lines:
        data = line[5:].strip()
        if data == b"[DONE]":
            finished = True
            break
        try:
            chunk = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            answer.error = f"an event is no chunk: {error}"
            return
        if chunk.error is not None:
            answer.error = f"error event: {chunk.error}"
            return
        if chunk.usage is not None:
            answer.input_tokens, answer.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            counted = True
        if any(_is_part(choice) for choice in chunk.choices):
            arrivals.append(when)
    answer.arrivals = arrivals
    if not counted:
        answer.output_tokens = len(arrivals)
    if not finished:
        answer.error = "the stream ended without [DONE]"
    elif not arrivals:
        answer.error = "the answer is empty"


def _is_part(choice: _Choice) -> bool:
    text = choice.text if choice.delta is None else choice.delta.content
    opening = choice.delta is not None and choice.delta.role is not None
    return bool(text) or (choice.finish_reason is None and not opening)


class HttpClient:
    """Streaming requests to one endpoint; connections are kept and used again.

    Args:
        base_url: such as http://127.0.0.1:8000.
        endpoint: path below it.
        api_key: sent as a bearer token, unless empty.

    Raises:
        UsageError: the address is none of plain HTTP.
    """

    def __init__(self, base_url: str, endpoint: str, api_key: str = "") -> None:
        where = urlsplit(base_url)
        if where.scheme != "http" or where.hostname is None:
            raise UsageError(f"--base-url: {base_url!r} is no address such as http://127.0.0.1:8000")
        self._host, self._port = where.hostname, where.port or 80
        head = f"POST {where.path.rstrip('/')}{endpoint} HTTP/1.1\r\nHost: {where.netloc}\r\n"
        head += "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
        head += f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = head.encode()
        self._idle: list[Connection] = []

    async def stream(self, body: bytes, answer: Answer, deadline_s: float) -> None:
        """Send a request and fill in its answer; what goes wrong becomes its error."""
        request = b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body)
        connection: Connection | None = None
        try:
            async with asyncio.timeout(deadline_s):
                connection = await self._connected()
                await connection.ask(request, answer)
        except TimeoutError:
            answer.error = f"no answer within {deadline_s:g} s"
        except OSError as error:
            answer.error = str(error)
        if connection is None:
            return
        if answer.error or connection.closed:
            connection.close()
        else:
            self._idle.append(connection)

    async def _connected(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, self._host, self._port))[1]

    def close(self) -> None:
        """Let go of all connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
