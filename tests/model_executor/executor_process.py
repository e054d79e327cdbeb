"""The core's end of the wire, as a test holds it, and an executor process that talks to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import zmq

from engine_core.wire import codec, transport
from engine_core.wire.child import Child
from engine_core.wire.config import EngineConfig, write_config
from engine_core.wire.executor import CoreToExecutor, ExecutorFatal, ExecutorHello, ExecutorToCore

M = TypeVar("M", bound=ExecutorToCore)
DEADLINE_S = 60.0


class CoreEnd:
    """A ROUTER that one executor connects to.

    Args:
        path: of the socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        transport.configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(transport.ipc_address(path))
        self._encode = codec.core_to_executor().encode
        self._decode = codec.executor_to_core().decode
        self._peer = b""

    def __enter__(self) -> CoreEnd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._socket.close()
        self._context.term()

    def receive(self, seconds: float = DEADLINE_S) -> ExecutorToCore:
        """The next message; fails when none comes in time."""
        assert self._socket.poll(int(seconds * 1000)), f"the executor said nothing for {seconds} s"
        self._peer, body = self._socket.recv_multipart()
        return self._decode(body)

    def until(self, kind: type[M]) -> tuple[list[ExecutorToCore], M]:
        """Messages before the first of this kind, and that one; fails at an ExecutorFatal that is not wanted."""
        before: list[ExecutorToCore] = []
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return before, message
            assert not isinstance(message, ExecutorFatal), message.message
            before.append(message)

    def send(self, message: CoreToExecutor) -> None:
        """Send to the executor that was heard last."""
        self.send_bytes(self._encode(message))

    def send_bytes(self, body: bytes) -> None:
        """Send anything."""
        self._socket.send_multipart([self._peer, body])


@contextmanager
def executor_process(folder: Path, config: EngineConfig, epoch: int = 1) -> Iterator[tuple[CoreEnd, Child]]:
    """A running executor that has said hello; it is gone afterwards."""
    path = folder / "engine.json"
    write_config(config, path)
    with CoreEnd(folder / "executor.sock") as core:
        arguments = ["-m", "model_executor", "--config", str(path), "--socket", str(core.path), "--epoch", str(epoch)]
        child = Child.spawn("executor", arguments)
        try:
            hello = core.receive()
            assert isinstance(hello, ExecutorHello)
            assert (hello.epoch, hello.pid) == (epoch, child.pid)
            yield core, child
        finally:
            child.end(5.0)


def gone(pid: int, seconds: float) -> bool:
    """Whether a process that is no child of ours ends in time; a zombie counts as ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
