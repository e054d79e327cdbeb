"""The internal sockets: whatever arrives there that is no message is dropped and counted, and nothing runs or dies."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.clients import Clients
from engine_core.wire import codec
from engine_core.wire.client import PROTOCOL, Abort, Hello, Inspect, Inspection, Ping, Submit
from engine_core.wire.errors import MalformedFrame
from engine_core.wire.executor import ExecutorHello, ExecutorToCore, StepResult
from engine_core.wire.sampling import SamplingParams
from engine_core.wire.transport import configure, ipc_address
from tests.fakes.core_process import RunningCore, WireClient, running_core
from tests.fakes.executor import continuation
from tests.fakes.live import eventually
from tests.hostile.conftest import config

PROMPT = [3, 1, 4, 1, 5]
MEBIBYTE = 2**20


class Bomb:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self._mark}",)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCore]:
    """A core with an executor that is ready."""
    with running_core(tmp_path_factory.mktemp("core"), config()) as running:
        running.client().connect()
        yield running


@pytest.fixture
def user(core: RunningCore) -> WireClient:
    """An honest client, who must notice nothing."""
    client = core.client()
    client.connect()
    return client


@pytest.fixture
def stranger(core: RunningCore) -> Iterator[Callable[[Path], zmq.Socket[bytes]]]:
    """Makes sockets of peers that nobody knows."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    kept: list[zmq.Socket[bytes]] = []

    def make(path: Path) -> zmq.Socket[bytes]:
        made = context.socket(zmq.DEALER)
        kept.append(made)
        configure(made)
        made.setsockopt(zmq.LINGER, 5000)
        made.connect(ipc_address(path))
        return made

    yield make
    for made in kept:
        made.close()
    context.term()


def check(core: RunningCore, user: WireClient, name: str, pids: list[int]) -> None:
    """The honest client's answer is exact, the ledger is whole, and the processes are the same."""
    user.submit(name, PROMPT)
    assert user.finish(name) == continuation(PROMPT, 8)
    user.send(Inspect(1))
    found = user.expect(Inspection)
    assert (found.owned, found.violations) == (0, [])
    assert processes(core) == pids


def processes(core: RunningCore) -> list[int]:
    return [core.child.pid, core.executor_pid]


def wrong_versions() -> list[bytes]:
    encode = msgspec.msgpack.encode
    return [
        encode(["hello", PROTOCOL + 1, "future"]),
        encode(["hello", -1, "past"]),
        encode(["hello", 2**63, "x"]),
        encode(["hello", PROTOCOL, "x" * 100_000]),
        encode(["nothing", 1, 2]),
        encode({"type": "hello", "protocol": PROTOCOL}),
        encode(["submit"]),
        encode(["submit", "x", b"\x01", {}]),
        encode(["abort", ["x"] * 100_000]),
    ]


@pytest.mark.parametrize("place", ["socket", "executor_socket"])
@pytest.mark.parametrize("kind", ["random", "huge", "pickle", "versions", "frames"])
def test_frames_that_are_no_messages(
    core: RunningCore, user: WireClient, stranger: Any, tmp_path: Path, place: str, kind: str
) -> None:
    pids, before = processes(core), user.status().malformed_frames
    mark = tmp_path / "ran"
    peer = stranger(getattr(core, place))
    draw = random.Random(7)
    sent: dict[str, list[list[bytes]]] = {
        "random": [[draw.randbytes(draw.randrange(1, 400))] for _ in range(300)],
        "huge": [[bytes(50 * MEBIBYTE)], [b"\xdd" + struct.pack(">I", 2**32 - 1) + bytes(50 * MEBIBYTE)]],
        "pickle": [[pickle.dumps(Bomb(mark), protocol)] for protocol in range(pickle.HIGHEST_PROTOCOL + 1)],
        "versions": [[each] for each in wrong_versions()],
        "frames": [[b"a", b"b", b"c"], [b""], [b"", b""], [b"x"] * 1000],
    }
    for frames in sent[kind]:
        peer.send_multipart(frames)
    # The other version's hello is answered, not dropped.
    least = len(sent[kind]) - (3 if kind == "versions" else 0)
    eventually(lambda: user.status().malformed_frames >= before + least, "all are counted")
    assert not mark.exists()
    check(core, user, f"{place} {kind}", pids)


@pytest.mark.parametrize("place", ["socket", "executor_socket"])
def test_bytes_that_are_not_even_zeromq(core: RunningCore, user: WireClient, place: str) -> None:
    pids = processes(core)
    draw = random.Random(8)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16)
    for data in (
        draw.randbytes(10_000),
        greeting,
        greeting + bytes(40) + b"\x06" + b"\xff" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.settimeout(5)
            raw.connect(str(getattr(core, place)))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                raw.sendall(data)
    check(core, user, f"raw {place}", pids)


def test_a_stranger_cannot_pass_for_the_executor(core: RunningCore, user: WireClient, stranger: Any) -> None:
    pids, before = processes(core), user.status().malformed_frames
    peer = stranger(core.executor_socket)
    encode = codec.executor_to_core().encode
    messages: list[ExecutorToCore] = [ExecutorHello(PROTOCOL, "0" * 16, 1, 1)]
    messages += [StepResult(1, step, [1, 2, 3], None, 0, 1) for step in range(20)]
    for message in messages:
        peer.send(encode(message))
    eventually(lambda: user.status().malformed_frames >= before + len(messages), "all are counted")
    check(core, user, "stranger", pids)


def test_one_client_cannot_touch_another_s_requests(core: RunningCore, user: WireClient) -> None:
    other = core.client()
    other.connect()
    user.start("mine")
    other.send(Abort(["mine"]))
    other.submit("mine", [9, 9])
    assert other.finish("mine") == continuation([9, 9], 8)
    assert not user.ended("mine")
    user.send(Abort(["mine"]))
    eventually(lambda: bool(user.receive()) and user.ended("mine"), "it ended")


def test_sockets_are_the_user_s_alone(core: RunningCore) -> None:
    for path in (core.socket, core.executor_socket):
        assert path.stat().st_mode & 0o777 == 0o600


def test_memory_comes_back_after_huge_frames(core: RunningCore, user: WireClient, stranger: Any) -> None:
    process = psutil.Process(core.child.pid)
    peer = stranger(core.socket)
    before, counted = process.memory_info().rss, user.status().malformed_frames
    for _ in range(10):
        peer.send(bytes(50 * MEBIBYTE))
    eventually(lambda: user.status().malformed_frames >= counted + 10, "all are counted")
    eventually(lambda: process.memory_info().rss < before + 40 * MEBIBYTE, "memory is given back")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TAGS = st.sampled_from(["hello", "submit", "abort", "ping", "drain", "bye", "inspect", "step_result", "progress"])
SHAPED = st.tuples(TAGS, st.lists(VALUES, max_size=8)).map(lambda pair: msgspec.msgpack.encode([pair[0], *pair[1]]))
REAL = st.sampled_from(
    [
        codec.client_to_core().encode(message)
        for message in (
            Hello(PROTOCOL, "x"),
            Ping(1),
            Abort(["a"]),
            Submit("r", codec.pack_ids(PROMPT), SamplingParams()),
        )
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A real message with some bytes changed, added or cut."""
    data = bytearray(draw(REAL))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(data)


FRAMES = st.binary(max_size=200) | SHAPED | mutated()


def take(frame: bytes) -> None:
    """Both decoders and the client table give a message, or nothing: no other error leaves them."""
    for decode in (codec.client_to_core().decode, codec.executor_to_core().decode, codec.core_to_client().decode):
        with contextlib.suppress(MalformedFrame):
            decode(frame)
    clients = Clients(Silent())  # type: ignore[arg-type]
    clients.take([b"peer", frame], 0.0)
    clients.admit(b"peer", "test", 0.0)
    taken = clients.take([b"peer", frame], 0.0)
    assert taken is not None or clients.malformed > 0


class Silent:
    """A socket that drops what is sent."""

    def send_multipart(self, *_: object, **__: object) -> Any:
        """Gone."""
        return self

    def result(self) -> None:
        """Sent."""


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(FRAMES)
def test_no_frame_raises_anything_but_malformed(frame: bytes) -> None:
    take(frame)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(FRAMES)
def test_ten_thousand_frames(frame: bytes) -> None:
    take(frame)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_messages_of_a_known_client_kill_nothing(core: RunningCore, user: WireClient, count: int) -> None:
    """A client that is known and goes mad: its own requests may suffer, no one else's."""
    pids, before = processes(core), user.status().malformed_frames
    mad = core.client()
    mad.connect()
    draw = random.Random(9)
    real = [
        codec.client_to_core().encode(
            Submit(f"r{number}", codec.pack_ids([number % 500]), SamplingParams(max_tokens=3))
        )
        for number in range(50)
    ]
    for _ in range(count):
        data = bytearray(draw.choice(real))
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        mad.socket.send(bytes(data))
        while mad.socket.poll(0):
            mad.socket.recv()
    # The answer comes after all before it was taken; what waits at a socket that closes is lost.
    mad.hello("still there")
    mad.close()
    assert user.status().malformed_frames - before > count / 4
    eventually(lambda: user.status().running == 0 and user.status().waiting == 0, "its requests ended", 20.0)
    check(core, user, "mad", pids)
