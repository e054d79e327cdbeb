"""Messages survive the wire, newer peers are understood, and no bytes do harm."""

from __future__ import annotations

import contextlib
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_core.wire import client, executor
from engine_core.wire.codec import Codec, pack_ids, unpack_ids
from engine_core.wire.errors import MalformedFrame
from tests.wire.messages import CLIENT_TO_CORE, CODECS, MESSAGES, name_of


@pytest.mark.parametrize(("direction", "message"), MESSAGES, ids=name_of)
def test_round_trip(direction: Codec[Any], message: object) -> None:
    assert direction.decode(direction.encode(message)) == message


def test_every_message_is_in_the_round_trip() -> None:
    unions = (client.ClientToCore, client.CoreToClient, executor.CoreToExecutor, executor.ExecutorToCore)
    for direction, union in zip(CODECS, unions, strict=True):
        tested = {type(message) for used, message in MESSAGES if used is direction}
        assert tested == set(typing.get_args(union))


@pytest.mark.parametrize(("direction", "message"), MESSAGES, ids=name_of)
def test_a_message_of_another_direction_is_malformed(direction: Codec[Any], message: object) -> None:
    frame = direction.encode(message)
    for other in CODECS:
        if other is not direction and type(message) is not client.Progress:
            with pytest.raises(MalformedFrame):
                other.decode(frame)


@pytest.mark.parametrize(("direction", "message"), MESSAGES, ids=name_of)
def test_a_newer_peer_may_send_more_fields(direction: Codec[Any], message: object) -> None:
    fields = msgspec.msgpack.decode(direction.encode(message))
    assert direction.decode(msgspec.msgpack.encode([*fields, "new", {"field": 1}])) == message


@pytest.mark.parametrize("direction", CODECS, ids=["client-core", "core-client", "core-executor", "executor-core"])
@given(frame=st.binary(max_size=200))
@settings(max_examples=500)
@example(frame=b"")
@example(frame=b"\x91" * 100_000)
@example(frame=b"\x81" * 100_000)
@example(frame=b"\x92\xa5abort\xdd\xff\xff\xff\xff")
@example(frame=b"\x92\xa5abort\x91\xdb\xff\xff\xff\xff")
@example(frame=b"\x92\xa5abort\x91\xa2\xff\xfe")
@example(frame=b"\x92\xa2\xff\xfe\x00")
@example(frame=b"\x80\x04\x95cposix\nsystem\n(S'true'\ntR.")
def test_random_bytes_are_malformed_or_a_message(direction: Codec[Any], frame: bytes) -> None:
    with contextlib.suppress(MalformedFrame):
        direction.decode(frame)


@given(data=st.data())
@settings(max_examples=1000)
def test_damaged_messages_are_malformed_or_a_message(data: st.DataObject) -> None:
    direction, message = data.draw(st.sampled_from(MESSAGES))
    frame = bytearray(direction.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut]), bytes(frame) + b"\x00"):
        with contextlib.suppress(MalformedFrame):
            direction.decode(damaged)


def test_bytes_are_fresh_for_each_message() -> None:
    first, second = CLIENT_TO_CORE.encode(client.Ping(1)), CLIENT_TO_CORE.encode(client.Ping(1))
    assert first == second
    assert first is not second


@given(ids=st.lists(st.integers(0, 2**31 - 1)))
def test_ids_round_trip(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert list(unpack_ids(packed)) == ids


def test_ids_are_little_endian() -> None:
    assert pack_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_ids_that_are_none() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(MalformedFrame, match="7 bytes"):
        unpack_ids(b"\x00" * 7)
