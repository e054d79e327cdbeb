"""The error tree of engine_core.

EngineCoreError
├── WireError               something between two processes
│   ├── MalformedFrame      bytes that are no message of this direction
│   ├── ProtocolMismatch    the peer speaks another protocol version or runs another configuration
│   ├── Backpressure        a peer does not read; its queue is full
│   ├── DeadlinePassed      an awaited message did not come in time
│   └── SocketPathTooLong   an ipc path over the kernel's limit
├── ChildError              a process below this one
│   ├── ChildDied           it ended, with the exit status
│   └── ChildRefused        it refused to start, with its reason
└── (engine_core.errors holds what only the core itself can raise)
"""

from __future__ import annotations


class EngineCoreError(Exception):
    """Root of every error that engine_core raises on purpose."""


class WireError(EngineCoreError):
    """Something went wrong between two processes."""


class MalformedFrame(WireError):
    """A frame that is not a message of the direction it came from."""


class ProtocolMismatch(WireError):
    """A peer with another protocol version or configuration hash.

    Args:
        field: what differs ("protocol" or "config_hash").
        expected: this side's value.
        given: the peer's value.
    """

    def __init__(self, field: str, expected: object, given: object) -> None:
        super().__init__(f"{field}: expected {expected}, the peer has {given}")
        self.field = field
        self.expected = expected
        self.given = given


class Backpressure(WireError):
    """The peer's queue is full: it does not read, or is gone."""


class DeadlinePassed(WireError):
    """An awaited message did not come in time.

    Args:
        what: the thing awaited.
        seconds: how long this side waited.
    """

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what}: nothing came within {seconds:g} s")
        self.what = what
        self.seconds = seconds


class SocketPathTooLong(WireError):
    """A unix socket path longer than the kernel takes.

    Args:
        path: the path.
        limit: the kernel's limit in bytes.
    """

    def __init__(self, path: str, limit: int) -> None:
        super().__init__(f"socket path: {len(path.encode())} bytes, at most {limit}: {path}")
        self.path = path
        self.limit = limit


class ChildError(EngineCoreError):
    """A process below this one failed."""


class ChildDied(ChildError):
    """A child ended without being asked to.

    Args:
        name: which child.
        pid: its process id.
        status: its exit status; negative is the signal that ended it.
    """

    def __init__(self, name: str, pid: int, status: int) -> None:
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        super().__init__(f"{name} (pid {pid}) ended: {how}")
        self.name = name
        self.pid = pid
        self.status = status


class ChildRefused(ChildError):
    """A child refused to start and said why.

    Args:
        code: machine-readable reason.
        message: one line for the operator, naming field, limit and value.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
