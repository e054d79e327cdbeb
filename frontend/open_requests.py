"""The requests of a client that have not ended, and what of them the core has not been told yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from engine_core.wire import client as wire
from engine_core.wire.errors import Backpressure
from frontend.errors import EngineDead, RequestRejected
from frontend.generation import Stream

# Requests that may wait here while there is no core.
MAX_PARKED: Final = 4096


class OpenRequests:
    """A request enters with `add`, and leaves with its last Output, a rejection, an abort, or the end of all.

    Args:
        send: hands a message to the core; raises Backpressure, or EngineDead while there is no core.
    """

    def __init__(self, send: Callable[[wire.ClientToCore], None]) -> None:
        self._send = send
        self._streams: dict[str, Stream] = {}
        self._unsent: dict[str, Stream] = {}
        self._unsent_aborts: set[str] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def add(self, stream: Stream) -> None:
        """Send a new request; the caller sees to it that its id is not open.

        Raises:
            EngineDead: there is no core.
            RequestRejected: it does not read.
        """
        # An abort that could not be sent yet would end a new request of the same id.
        self.flush()
        name = stream.submit.request_id
        if name in self._unsent_aborts or self._unsent:
            raise RequestRejected("queue_full", "the engine core does not read", retry_after_s=1.0)
        try:
            self._send(stream.submit)
        except Backpressure as error:
            raise RequestRejected("queue_full", "the engine core does not read", retry_after_s=1.0) from error
        stream.sent = True
        self._streams[name] = stream

    def park(self, stream: Stream) -> None:
        """Keep a new request for the next core.

        Raises:
            RequestRejected: too many wait already.
        """
        if len(self._streams) >= MAX_PARKED:
            raise RequestRejected("queue_full", f"{MAX_PARKED} requests wait for an engine", retry_after_s=1.0)
        self._streams[stream.submit.request_id] = stream

    def abort(self, request_id: str, *, told: bool) -> None:
        """A request ends by the client's will; the core is told, unless there is none (`told` False)."""
        if self._streams.pop(request_id, None) is None:
            return
        # One that the present core never had needs no word.
        if self._unsent.pop(request_id, None) is None and told:
            self._unsent_aborts.add(request_id)
            self.flush()

    def flush(self) -> None:
        """Send what could not be sent; a core that does not read now gets it another time."""
        with contextlib.suppress(Backpressure, EngineDead):
            if self._unsent_aborts:
                self._send(wire.Abort(sorted(self._unsent_aborts)))
                self._unsent_aborts.clear()
            while self._unsent:
                request_id, stream = next(iter(self._unsent.items()))
                self._send(stream.resumed())
                stream.sent = True
                del self._unsent[request_id]

    def resubmit(self) -> int:
        """Another core: it is given all that is open, in the order of arrival; gives how many there are."""
        self._unsent = dict(self._streams)
        self.flush()
        return len(self._streams)

    def forget_unsent(self) -> None:
        """The core is gone, and with it what it was still to be told."""
        self._unsent.clear()
        self._unsent_aborts.clear()

    def feed(self, message: wire.Outputs) -> None:
        """Hand Outputs to their streams; what crosses an abort finds none."""
        for output in message.items:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish is not None:
                del self._streams[output.request_id]
            stream.feed(output)

    def reject(self, message: wire.Rejected) -> None:
        """The core did not take a request."""
        stream = self._streams.pop(message.request_id, None)
        if stream is not None:
            error = RequestRejected(
                message.code, message.message, message.field, message.limit, message.given, message.retry_after_s
            )
            stream.fail(error)

    def fail_all(self, fatal: wire.Fatal) -> None:
        """All is over."""
        self.forget_unsent()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDead(fatal.message, fatal.code))
