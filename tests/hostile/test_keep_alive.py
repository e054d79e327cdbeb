"""Connections that think between requests, as client pools do, are never cut under them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.hostile.process import Served

REQUEST = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request on an open connection."""
    writer.write(REQUEST)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert head.startswith(b"HTTP/1.1 200 ")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    await asyncio.wait_for(reader.readexactly(length), 10)


async def talk(url: str, pauses: list[float]) -> None:
    """Requests on one connection, with these pauses after each."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for pause in pauses:
        await ask(reader, writer)
        await asyncio.sleep(pause)
    await ask(reader, writer)
    writer.close()
    await writer.wait_closed()


async def talk_all(url: str, plans: list[list[float]]) -> None:
    await asyncio.gather(*(talk(url, pauses) for pauses in plans))


def test_many_short_pauses(chain_folder: Path) -> None:
    draw = random.Random(1)
    with Served(chain_folder) as server:
        asyncio.run(talk_all(server.url, [[draw.random() * 0.2 for _ in range(10)] for _ in range(50)]))


@pytest.mark.slow
def test_pauses_as_long_as_the_limits_that_others_have(chain_folder: Path) -> None:
    """2,000 requests with pauses around 5 s, and single pauses of 6 s, 30 s and 75 s."""
    draw = random.Random(2)
    plans = [[draw.uniform(4.9, 5.1) for _ in range(39)] for _ in range(50)]
    with Served(chain_folder) as server:
        asyncio.run(talk_all(server.url, [*plans, [6.0, 30.0], [75.0]]))
