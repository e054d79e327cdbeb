"""The error tree of engine_core.

EngineCoreError
├── WireError               something between two processes
│   ├── MalformedFrame      bytes that are no message of this direction
│   ├── Backpressure        a peer does not read; its queue is full
│   └── SocketPathTooLong   an ipc path over the kernel's limit
└── (engine_core.errors holds what only the core itself can raise)
"""

from __future__ import annotations


class EngineCoreError(Exception):
    """Root of every error that engine_core raises on purpose."""


class WireError(EngineCoreError):
    """Something went wrong between two processes."""


class MalformedFrame(WireError):
    """A frame that is not a message of the direction it came from."""


class Backpressure(WireError):
    """The peer's queue is full: it does not read, or is gone."""


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
