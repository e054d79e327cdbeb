"""Messages of clients: their bytes, their limits, and what older peers may leave out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine_core.wire import client
from engine_core.wire.codec import Codec
from engine_core.wire.errors import MalformedFrame
from tests.wire.messages import CLIENT_TO_CORE, CORE_TO_CLIENT, PARAMS, name_of


@pytest.mark.parametrize(
    ("direction", "message", "since"),
    [
        (CLIENT_TO_CORE, client.Submit("r1", b"", PARAMS), 4),
        (CORE_TO_CLIENT, client.Rejected("r1", "invalid", "no"), 4),
        (CORE_TO_CLIENT, client.Status(1, "ready"), 3),
        (CORE_TO_CLIENT, client.Progress("load", 1, 2), 4),
    ],
    ids=name_of,
)
def test_an_older_peer_may_leave_out_later_fields(direction: Codec[Any], message: object, since: int) -> None:
    """`since`: the tag and the fields that the first version had."""
    fields = msgspec.msgpack.decode(direction.encode(message))
    assert direction.decode(msgspec.msgpack.encode(fields[:since])) == message


def test_an_output_may_leave_out_later_fields() -> None:
    frame = msgspec.msgpack.encode(["outputs", 3, [["r1", [5]]]])
    assert CORE_TO_CLIENT.decode(frame) == client.Outputs(3, [client.Output("r1", [5])])


@pytest.mark.parametrize(
    ("direction", "message", "golden"),
    [
        (CLIENT_TO_CORE, client.Hello(1, "http"), "93a568656c6c6f01a468747470"),
        (CLIENT_TO_CORE, client.Abort(["a"]), "92a561626f727491a161"),
        (CORE_TO_CLIENT, client.Fatal("shutdown", "x"), "94a5666174616ca873687574646f776ea178c3"),
    ],
    ids=name_of,
)
def test_golden_bytes(direction: Codec[Any], message: object, golden: str) -> None:
    """Another build must read these; changing them means another protocol version."""
    assert direction.encode(message).hex() == golden
    assert direction.decode(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(
    "fields",
    [
        ["submit", "", b"", []],
        ["submit", "x" * 129, b"", []],
        ["submit", "r1", b"", [], 2**31],
        ["submit", "r1", b"", [], 0, ""],
        ["submit", "r1", b"", [], 0, "s" * 257],
        ["submit", "r1", [1, 2], []],
        ["hello", 1, "n" * 65],
        ["abort", "r1"],
        ["abort", [""]],
        ["ping", "1"],
        ["ping", 1.5],
    ],
    ids=lambda fields: f"{fields[0]}-{len(fields)}",
)
def test_client_message_limits(fields: list[object]) -> None:
    with pytest.raises(MalformedFrame):
        CLIENT_TO_CORE.decode(msgspec.msgpack.encode(fields))


def test_buckets_rise() -> None:
    for bounds in (client.STEP_TIME_BOUNDS, client.STEP_TOKEN_BOUNDS):
        assert list(bounds) == sorted(set(bounds))


def test_a_client_is_not_silent_between_two_pings() -> None:
    assert 4 * client.CLIENT_PING_S < client.CLIENT_SILENCE_S
