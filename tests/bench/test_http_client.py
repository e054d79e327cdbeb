"""The streaming client against servers that say anything."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from bench.answer import Answer
from bench.errors import UsageError
from bench.http_client import HttpClient

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"


def text(content: str, finish: str = "null") -> bytes:
    """An event of a completion."""
    return b'data: {"choices": [{"index": 0, "text": "%b", "finish_reason": %b}]}\n\n' % (
        content.encode(),
        finish.encode(),
    )


def chat(delta: str, finish: str = "null") -> bytes:
    """An event of a chat."""
    return b'data: {"choices": [{"index": 0, "delta": %b, "finish_reason": %b}]}\n\n' % (
        delta.encode(),
        finish.encode(),
    )


def chunked(*parts: bytes, size: int = 10**6) -> bytes:
    """An answer in chunks of at most `size` bytes, which need not end where events do."""
    body = b"".join(parts)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


class Server:
    """Gives one answer after the other, whatever it is asked.

    Attributes:
        url: of it.
        requests: that came; connections: how many did.
    """

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.url = ""
        self.requests: list[bytes] = []
        self.connections = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._answers = list(answers)

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection came."""
        self.tasks.append(asyncio.create_task(self.handle(reader, writer)))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split()[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self._answers.pop(0)
                writer.write(answer)
                if not answer.endswith(b"0\r\n\r\n"):
                    break
            await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Silent(Server):
    """Reads, and says nothing."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        await reader.read()
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def serving(*answers: bytes, kind: type[Server] = Server) -> AsyncIterator[Server]:
    """A server that gives these answers."""
    server = kind(answers)
    async with await asyncio.start_server(server.connected, "127.0.0.1", 0) as listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield server
    await asyncio.wait_for(asyncio.gather(*server.tasks), 10)


async def ask(server: Server, client: HttpClient | None = None, deadline_s: float = 10.0) -> Answer:
    """One request."""
    asking = client or HttpClient(server.url, "/v1/completions", "key")
    answer = Answer(due=0.0)
    await asking.stream(b"{}", answer, deadline_s)
    if client is None:
        asking.close()
        await asyncio.sleep(0)
    return answer


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_and_counts_are_read_however_they_are_cut(size: int) -> None:
    async def run() -> Answer:
        async with serving(chunked(text("a"), text(""), text("c", '"length"'), USAGE, DONE, size=size)) as server:
            return await ask(server)

    answer = asyncio.run(run())
    assert (answer.error, len(answer.arrivals)) == ("", 3)
    assert (answer.input_tokens, answer.output_tokens) == (5, 4)
    assert 0 < answer.sent <= answer.arrivals[0] <= answer.arrivals[-1] <= answer.ended


def test_the_opening_and_the_end_of_a_chat_are_no_parts_of_it() -> None:
    events = (chat('{"role": "assistant", "content": ""}'), chat('{"content": "a"}'), chat("{}", '"stop"'))

    async def run() -> Answer:
        async with serving(chunked(*events, DONE)) as server:
            return await ask(server)

    answer = asyncio.run(run())
    # Without counts of the server, events are counted.
    assert (answer.error, len(answer.arrivals), answer.output_tokens) == ("", 1, 1)


def test_lines_may_end_as_in_windows_and_comments_do_not_count() -> None:
    events = b": ping\r\n\r\n" + text("a").replace(b"\n", b"\r\n") + DONE.replace(b"\n", b"\r\n")

    async def run() -> Answer:
        async with serving(chunked(events)) as server:
            return await ask(server)

    assert len(asyncio.run(run()).arrivals) == 1


def test_a_connection_is_used_again_and_a_closed_one_is_not() -> None:
    whole = chunked(text("a"), DONE)
    last = whole.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)

    async def run() -> tuple[list[str], int, bytes]:
        async with serving(whole, last, whole) as server:
            client = HttpClient(server.url, "/v1/completions", "key")
            errors = [(await ask(server, client)).error for _ in range(3)]
            client.close()
            await asyncio.sleep(0)
            return errors, server.connections, server.requests[0]

    errors, connections, request = asyncio.run(run())
    assert (errors, connections) == ([""] * 3, 2)
    assert request.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer key\r\n" in request


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b'HTTP/1.1 400 Bad\r\ncontent-length: 12\r\n\r\n{"error": 1}', "status 400: {"),
        (chunked(text("a")), "without"),
        (chunked(DONE), "empty"),
        (chunked(b'data: {"error": {"message": "no"}}\n\n', DONE), "error event: .*no"),
        (chunked(b"data: {\n\n", DONE), "no chunk"),
        (HEAD + b"5\r\ndata", "closed before"),
        (b"no http\r\n\r\n", "no HTTP"),
        (b"", "closed before"),
    ],
)
def test_what_goes_wrong_is_the_answers_error(answer: bytes, error: str) -> None:
    async def run() -> Answer:
        async with serving(answer) as server:
            return await ask(server)

    assert re.search(error, asyncio.run(run()).error)


def test_a_server_that_says_nothing_is_waited_for_until_the_deadline() -> None:
    async def run() -> Answer:
        async with serving(kind=Silent) as server:
            return await ask(server, deadline_s=0.05)

    assert asyncio.run(run()).error == "no answer within 0.05 s"


def test_nobody_listens() -> None:
    async def run() -> Answer:
        async with serving() as server:
            pass
        return await ask(server)

    assert re.search("refused|Connect call failed", asyncio.run(run()).error)


@pytest.mark.parametrize("url", ["https://x", "x:80", "http://"])
def test_only_plain_http_is_spoken(url: str) -> None:
    with pytest.raises(UsageError, match="--base-url"):
        HttpClient(url, "/v1/completions")
