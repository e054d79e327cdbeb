"""A real engine core process with the fake executor below it, and a client that speaks the wire by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import zmq

from engine_core.wire import codec
from engine_core.wire.child import Child
from engine_core.wire.client import (
    PROTOCOL,
    ClientToCore,
    CoreToClient,
    Fatal,
    Hello,
    Output,
    Outputs,
    Ping,
    Ready,
    Rejected,
    Status,
    Submit,
    Welcome,
)
from engine_core.wire.config import EngineConfig, ModelOptions, write_config
from engine_core.wire.sampling import SamplingParams
from engine_core.wire.transport import CORE_SOCKET, EXECUTOR_SOCKET, configure, ipc_address

M = TypeVar("M", bound=CoreToClient)

FAKE_EXECUTOR = "tests.fakes.executor"
ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=900)


def fake_model(script: str = "") -> ModelOptions:
    """Model options that give the fake executor its script."""
    return ModelOptions(model=f"fake:{script}")


class WireClient:
    """A client by hand: blocking, with a deadline on every wait; it pings only when told to.

    Args:
        path: the core's socket.

    Attributes:
        outputs: what came so far, by request.
    """

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        configure(self.socket)
        self.socket.connect(ipc_address(path))
        self._incoming = codec.core_to_client()
        self._outgoing = codec.client_to_core()
        self.outputs: dict[str, list[Output]] = {}

    def send(self, message: ClientToCore) -> None:
        """Send a message."""
        self.socket.send(self._outgoing.encode(message))

    def receive(self, seconds: float = 10.0) -> CoreToClient:
        """The next message; Outputs are noted by request too.

        Raises:
            AssertionError: none within `seconds`.
        """
        assert self.socket.poll(int(seconds * 1000)), f"no message within {seconds:g} s"
        message = self._incoming.decode(self.socket.recv())
        if isinstance(message, Outputs):
            for output in message.items:
                self.outputs.setdefault(output.request_id, []).append(output)
        return message

    def expect(self, kind: type[M], seconds: float = 10.0) -> M:
        """The next message of a kind; others are passed over, but not a Fatal."""
        deadline = time.monotonic() + seconds
        while True:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message
            assert not isinstance(message, Fatal), message

    def silent_for(self, seconds: float) -> bool:
        """Whether nothing comes for a while."""
        return not self.socket.poll(int(seconds * 1000))

    def hello(self, name: str = "test") -> Welcome:
        """Say hello; gives the answer."""
        self.send(Hello(PROTOCOL, name))
        return self.expect(Welcome)

    def connect(self) -> Ready:
        """Say hello, and wait until the engine takes requests."""
        self.hello()
        return self.expect(Ready)

    def submit(self, request_id: str, prompt: Sequence[int], params: SamplingParams = GREEDY) -> None:
        """Send a request."""
        self.send(Submit(request_id, codec.pack_ids(prompt), params))

    def start(self, request_id: str, prompt: Sequence[int] = (1, 2, 3)) -> None:
        """Send a request that goes on for long, and wait for its first token."""
        self.submit(request_id, prompt, ENDLESS)
        while not self.tokens(request_id):
            message = self.receive()
            assert not isinstance(message, Fatal | Rejected), message

    def finish(self, request_id: str, seconds: float = 10.0) -> list[int]:
        """Wait for the end of a request; gives all its tokens."""
        deadline = time.monotonic() + seconds
        while not self.ended(request_id):
            message = self.receive(max(0.0, deadline - time.monotonic()))
            assert not isinstance(message, Fatal | Rejected), message
        return self.tokens(request_id)

    def ended(self, request_id: str) -> bool:
        """Whether the last Output of a request has come."""
        return any(output.finish for output in self.outputs.get(request_id, []))

    def tokens(self, request_id: str) -> list[int]:
        """Tokens of a request that came so far."""
        return [token for output in self.outputs.get(request_id, []) for token in output.token_ids]

    def status(self, seq: int = 0) -> Status:
        """Ask for the status."""
        self.send(Ping(seq))
        return self.expect(Status)

    def last_words(self, seconds: float = 10.0) -> Fatal:
        """What the client is told at the end; other messages are passed over."""
        while not isinstance(message := self.receive(seconds), Fatal):
            pass
        return message

    def close(self) -> None:
        """Leave without a word."""
        self._context.destroy(linger=0)


class RunningCore:
    """A core process.

    Attributes:
        child: the process.
        socket: where clients connect. executor_socket: where the executor connects.
    """

    def __init__(self, folder: Path, config: EngineConfig, arguments: Sequence[str] = ()) -> None:
        self.socket = folder / CORE_SOCKET
        self.executor_socket = folder / EXECUTOR_SOCKET
        write_config(config, folder / "engine.json")
        self._clients: list[WireClient] = []
        self.child = Child.spawn("engine core", [*core_arguments(folder), *arguments])

    def client(self) -> WireClient:
        """A new client, not yet known to the core."""
        client = WireClient(self.socket)
        self._clients.append(client)
        return client

    @property
    def executor_pid(self) -> int:
        """The process below the core.

        Raises:
            AssertionError: it does not show up.
        """
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            children = psutil.Process(self.child.pid).children()
            if children:
                return int(children[0].pid)
            time.sleep(0.005)
        raise AssertionError("the core started no executor")

    def end(self) -> int:
        """End the core; gives its exit status."""
        for client in self._clients:
            client.close()
        return self.child.end(10.0)


def core_arguments(folder: Path) -> list[str]:
    """The command line of a core with the fake executor, after `python`."""
    return [
        *("-m", "engine_core", "--config", str(folder / "engine.json")),
        *("--socket", str(folder / CORE_SOCKET), "--runtime-dir", str(folder)),
        *("--executor-module", FAKE_EXECUTOR),
    ]


@contextmanager
def running_core(folder: Path, config: EngineConfig, arguments: Sequence[str] = ()) -> Iterator[RunningCore]:
    """A core that has ended when the block is left. The children must find the tests: the root is put on their path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    core = RunningCore(folder, config, arguments)
    try:
        yield core
    finally:
        core.end()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
