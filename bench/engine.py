"""Loads on a server of our own, from this process: over ZeroMQ with the Python client, or through HTTP."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import uvloop
from msgspec import Struct, to_builtins

from bench.answer import Answer
from bench.load import Load, Send, run_load
from bench.prompts import Request
from bench.serve import COMPLETIONS, Endpoint
from bench.target import model_name, served
from engine_core.wire.sampling import SamplingParams
from frontend.async_client import AsyncClient
from frontend.errors import EngineDead, GenerationError, RequestRejected
from frontend.proof.own_server import OwnServer

READY_S: Final = 1800.0

T = TypeVar("T")


class Engine(Struct, frozen=True):
    """A server that takes loads over ZeroMQ.

    Attributes:
        send: sends one request over ZeroMQ and fills in its answer; send_http: the same through HTTP.
        kernels: that it chose, as in /reports/kernels.
    """

    send: Send
    send_http: Send
    kernels: object

    async def at_once(self, requests: Sequence[Request], *, http: bool = False) -> Load:
        """All requests together."""
        return await run_load(self.send_http if http else self.send, requests, [0.0] * len(requests), None)


def with_engine(words: str, flags: Sequence[str], work: Callable[[Engine], Awaitable[T]]) -> T:
    """Start our own server, let `work` measure it, and end it.

    Args:
        words: of --serve.
        flags: further flags of `tercet serve`.
        work: gives what is returned.
    """
    model, given = served(words)
    with OwnServer(model, [*given, *flags]) as server:
        server.wait_ready()
        endpoint = Endpoint(server.url, COMPLETIONS, model_name(server.url))
        found: T = uvloop.run(_connected(server.socket, endpoint, work))
        return found


async def _connected(socket: Path, endpoint: Endpoint, work: Callable[[Engine], Awaitable[T]]) -> T:
    async with endpoint.sender() as send_http, await AsyncClient.connect(socket, name="bench") as client:
        ready = await client.wait_ready(READY_S)

        async def send(request: Request, answer: Answer) -> None:
            await _stream(client, request, answer)

        return await work(Engine(send, send_http, to_builtins(ready.kernels)))


async def _stream(client: AsyncClient, request: Request, answer: Answer) -> None:
    assert not isinstance(request.prompt, str), "loads on the engine are of token ids"
    params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
    answer.sent = time.perf_counter()
    try:
        async for output in client.submit(request.prompt, params):
            answer.arrivals.append(time.perf_counter())
            answer.output_tokens += len(output.token_ids)
    except (EngineDead, GenerationError, RequestRejected) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    if not answer.arrivals and not answer.error:
        answer.error = "the answer is empty"
