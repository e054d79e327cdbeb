"""What the endpoints stand on: the engine, the texts, the counters; handed to each of them, never looked up."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from msgspec.structs import replace

from engine_core.wire.client import EngineState, Model
from frontend.api.running import Running
from frontend.client import AsyncClient
from frontend.config import HttpOptions
from frontend.errors import NotReady
from frontend.health import TAKING, Signs, judge
from frontend.metrics import Metrics

RETRY_AFTER_S: Final = 2.0
MAX_REQUEST_ID: Final = 128


class Engine(Protocol):
    """The engine as the endpoints see it, whatever stands behind it at the moment."""

    @property
    def signs(self) -> Signs:
        """What is known of its health."""

    @property
    def client(self) -> AsyncClient | None:
        """The connection to it; None until there is one."""


@dataclass
class Service:
    """One server's parts.

    Attributes:
        options: of the endpoint.
        names: the model may be called by; the first stands in answers.
        engine: the engine.
        metrics: counters.
        running: answers being made.
        draining: nothing new is taken.
        wall_clock: seconds since 1970, for `created`.
        started: when the server began, by that clock.
    """

    options: HttpOptions
    names: tuple[str, ...]
    engine: Engine
    metrics: Metrics
    running: Running = field(default_factory=Running)
    draining: bool = False
    wall_clock: Callable[[], float] = time.time
    started: int = field(default_factory=lambda: int(time.time()))

    def state(self) -> tuple[EngineState, str]:
        """The state for readers, and the reason where it is not "ready"."""
        return judge(replace(self.engine.signs, draining=self.draining))

    def ready_client(self) -> tuple[AsyncClient, Model]:
        """The connection to submit to; while a process is replaced requests are taken, and wait.

        Raises:
            NotReady: nothing is taken now.
        """
        state, reason = self.state()
        client = self.engine.client
        model = client.model if client is not None else None
        if state not in TAKING or client is None or model is None:
            raise NotReady(state, reason, RETRY_AFTER_S)
        return client, model


def new_id(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}-{secrets.token_hex(16)}"


def request_id(given: str | None, fallback: str) -> str:
    """The id for the response header: the client's own when it is short and plain, else the answer's."""
    if given and len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return fallback
