"""One HTTP connection: uvicorn's protocol with limits on what a client may send, leave unread, and keep waiting.

A client costs what it is given: a head of bounded size in bounded time, a body that keeps coming, an answer that is
read. `check` is called about once a second and ends the connections that pass a limit; `Cuts` counts them by reason.
A client that sends its next request early is read on, so that its leaving is seen while the first one is answered.
"""

from __future__ import annotations

import array
import fcntl
import logging
import termios
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontend.api.errors import INVALID, UNAVAILABLE, ErrorAnswer, ErrorBody
from frontend.api.exchange import CONNECTION

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 65_536
MAX_HEADERS: Final = 128

Reason = Literal[
    "idle", "slow_head", "slow_body", "unread_answer", "sent_ahead", "unread_body", "no_room", "not_closed"
]
# Endings that are nobody's fault.
ORDINARY: Final = frozenset({"idle"})


@dataclass(frozen=True)
class HttpLimits:
    """What a connection may take.

    Attributes:
        idle_s: seconds between two requests, or before the first.
        head_s: seconds for the head of a request, from its first byte.
        body_s: seconds that a body may take beyond what `body_rate` allows; body_rate: bytes a second.
        stall_s: seconds without any progress while an answer waits to be read.
        close_s: seconds that a closed connection gets to deliver its last bytes.
        ahead_bytes: of further requests that are sent before an answer has ended.
        discard_bytes: of a body that come after its answer.
        connections: open at a time.
    """

    idle_s: float = 120.0
    head_s: float = 20.0
    body_s: float = 30.0
    body_rate: float = 1024.0
    stall_s: float = 60.0
    close_s: float = 10.0
    ahead_bytes: int = 65_536
    discard_bytes: int = 1_048_576
    connections: int = 65_536


@dataclass
class Cuts:
    """Connections that the server ended, by reason.

    Attributes:
        counts: all of them.
        note: called for each.
    """

    note: Callable[[str], None] = lambda _: None
    counts: Counter[str] = field(default_factory=Counter)
    _told: Counter[str] = field(default_factory=Counter)

    def add(self, reason: Reason) -> None:
        """One more."""
        self.counts[reason] += 1
        self.note(reason)

    def report(self) -> None:
        """One log line for all since the last report; none when there were none."""
        new = self.counts - self._told
        self._told = self.counts.copy()
        told = {reason: count for reason, count in new.items() if reason not in ORDINARY}
        if told:
            logger.warning(
                "http: ended connections that passed a limit: %s", ", ".join(f"{n} {why}" for why, n in told.items())
            )


class HeadersTooLarge(Exception):
    """The head of a request passes a limit."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection.

    The parser keeps an unfinished header to itself, so the bytes that came in are counted, not the headers it gave.

    Args:
        limits: of each connection.
        cuts: where endings are counted.
    """

    def __init__(self, *args: Any, limits: HttpLimits, cuts: Cuts, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own signature
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._cuts = cuts
        self.reason: Reason | None = None
        self._phase: Literal["idle", "head", "body", "answer"] = "idle"
        self._since = self.loop.time()
        self._head_bytes = 0
        self._body_bytes = 0
        self._without_body = 0
        self._discarded = 0
        self._ended = 0
        self._too_large = False
        self._ahead = bytearray()
        self._answered: RequestResponseCycle | None = None
        self._unread = 0
        self._unread_since: float | None = None
        self._closing_since: float | None = None

    # What the transport calls.

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - uvicorn's own signature
        """Take the connection, or refuse it when there are too many."""
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) > self._limits.connections and not self._make_room():
            self._refuse(
                "503", "Service Unavailable", "too many connections are open; try again", "no_room", UNAVAILABLE
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: so is every request on it. uvicorn tells the one that came last only."""
        super().connection_lost(exc)
        self.pipeline.clear()
        self._ahead.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - an ASGI application
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _make_room(self) -> bool:
        idle = [each for each in self.connections if isinstance(each, BoundedProtocol) and each.is_idle]
        idle = [each for each in idle if each is not self]
        if not idle:
            return False
        min(idle, key=lambda each: each._since).cut("idle")
        return True

    def data_received(self, data: bytes) -> None:
        """Parse, unless the head is already too large, or an answer must end first."""
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._keep_ahead(data)
            return
        if self._phase == "idle":
            self._enter("head")
        self._feed(data)
        if self.pipeline:
            # uvicorn stops reading here; then nobody would see the client leave.
            self.flow.resume_reading()

    def _feed(self, data: bytes) -> None:
        before, ended, body = self._head_bytes, self._ended, self._body_bytes + self._discarded
        super().data_received(data)
        if self.transport.is_closing():
            return
        # Where a request ended in these bytes, most of them were its body.
        if self._phase == "head" and self._ended == ended:
            self._head_bytes = before + len(data)
        elif self._phase == "body":
            # Frames of chunks and trailers count as a head does, when no body comes between them.
            moved = self._body_bytes + self._discarded != body
            self._without_body = 0 if moved else self._without_body + len(data)
        if max(self._head_bytes, self._without_body) > MAX_HEADER_BYTES:
            self._too_large = True
            self.send_400_response("")

    def _keep_ahead(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) > self._limits.ahead_bytes:
            self.cut("sent_ahead")

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._enter("head")
        self._head_bytes = self._without_body = 0
        self.scope["extensions"] = {CONNECTION: {"abort": self.transport.abort, "reason": lambda: self.reason}}

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header."""
        self._head_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._head_bytes > MAX_HEADER_BYTES:
            self._too_large = True
            raise HeadersTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is done."""
        if len(self.url) > MAX_HEADER_BYTES:
            self._too_large = True
            raise HeadersTooLarge
        self._enter("body")
        self._head_bytes = self._body_bytes = self._discarded = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some bytes of the body; those that come after the answer are dropped, up to a limit."""
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > self._limits.discard_bytes:
                self.cut("unread_body")
            return
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is done; the next one's head begins."""
        super().on_message_complete()
        self._ended += 1
        self._head_bytes = self._without_body = 0
        self._enter("idle" if self.cycle.response_complete else "answer")

    def on_response_complete(self) -> None:
        """An answer is on its way; the next request may have come already."""
        super().on_response_complete()
        if self._phase == "answer" and not self.is_busy:
            self._enter("idle")
        if self._ahead and not self.pipeline and not self.transport.is_closing():
            # Not from here: the answer's own task still runs, and so does its request.
            self.loop.call_soon(self._feed_ahead)

    def _feed_ahead(self) -> None:
        data, self._ahead = bytes(self._ahead), bytearray()
        if data:
            self.data_received(data)

    def timeout_keep_alive_handler(self) -> None:
        """uvicorn's own timer; `check` does the same and more."""

    # Limits.

    @property
    def is_busy(self) -> bool:
        """Whether an answer is being made."""
        # Before the first request there is no cycle, whatever uvicorn's types say.
        return bool(self.cycle) and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked and nothing answered."""
        return self._phase == "idle" and not self.is_busy and not self.transport.is_closing()

    def check(self, now: float) -> None:
        """End the connection when it has passed a limit of time; `now` is the loop's."""
        limits, waited = self._limits, now - self._since
        if self.transport.is_closing():
            self._check_closing(now)
        elif self._stalled(now):
            self.cut("unread_answer")
        elif self._phase == "idle" and not self.is_busy and waited > limits.idle_s:
            self.cut("idle")
        elif self._phase == "head" and waited > limits.head_s:
            self._time_out("head", limits.head_s, "slow_head")
        elif self._phase == "body" and not self.flow.read_paused:
            allowed = limits.body_s + (self._body_bytes + self._discarded) / limits.body_rate
            if waited > allowed:
                self._time_out("body", allowed, "slow_body")

    def forgive(self, seconds: float) -> None:
        """The server itself stood still for so long."""
        self._since += seconds
        if self._unread_since is not None:
            self._unread_since += seconds

    def cut(self, reason: Reason) -> None:
        """End the connection at once; what is still to be sent is lost."""
        if self.reason is None:
            self.reason = reason
            self._cuts.add(reason)
        self.transport.abort()

    def _check_closing(self, now: float) -> None:
        if self._closing_since is None:
            self._closing_since = now
        elif now - self._closing_since > self._limits.close_s:
            self.cut("not_closed")

    def _stalled(self, now: float) -> bool:
        """Whether an answer waits and nothing of it has left, neither from here nor from the system's own buffer."""
        waiting = self.flow.write_paused or (self.transport.get_write_buffer_size() > 0 and not self.is_busy)
        unread = self.transport.get_write_buffer_size() + _in_flight(self.transport) if waiting else 0
        if not waiting or self._unread_since is None or unread < self._unread:
            self._unread_since = now if waiting else None
        self._unread = unread
        return self._unread_since is not None and now - self._unread_since > self._limits.stall_s

    def _time_out(self, part: str, seconds: float, reason: Reason) -> None:
        if self.is_busy and self.cycle.response_started:
            self.cut(reason)
            return
        self._refuse(
            "408", "Request Timeout", f"the {part} of the request did not come within {seconds:.0f} s", reason, INVALID
        )

    def _enter(self, phase: Literal["idle", "head", "body", "answer"]) -> None:
        if phase != self._phase:
            self._phase, self._since = phase, self.loop.time()

    # Answers that no application gives.

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, in the shape of all errors, and close."""
        if self.transport.is_closing():
            return
        if self._too_large:
            text = f"the head of a request is at most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes"
            self._refuse("431", "Request Header Fields Too Large", text, None, INVALID)
        else:
            self._refuse("400", "Bad Request", msg, None, INVALID)

    def _refuse(self, status: str, phrase: str, text: str, reason: Reason | None, kind: str) -> None:
        if reason is not None:
            self.reason = reason
            self._cuts.add(reason)
        body = msgspec.json.encode(ErrorAnswer(ErrorBody(text, kind, None, reason)))
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _in_flight(transport: Any) -> int:  # noqa: ANN401 - of uvloop or asyncio
    """Bytes that the system holds for the peer: sent and not acknowledged, or not sent yet."""
    count = array.array("i", [0])
    fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
    return count[0]
