"""Messages to bytes and back: one encoder and one decoder for each direction."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

from engine_core.wire.client import ClientToCore, CoreToClient
from engine_core.wire.errors import MalformedFrame
from engine_core.wire.executor import CoreToExecutor, ExecutorToCore

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and decodes the messages of one direction.

    Args:
        messages: the union of message types.
        name: of the direction, for errors.
    """

    def __init__(self, messages: Any, name: str) -> None:  # noqa: ANN401 - a union is no type[M]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._name = name

    def encode(self, message: M) -> bytes:
        """The message as msgpack bytes, fresh for each call: ZeroMQ may keep them."""
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> M:
        """The message in `frame`.

        Raises:
            MalformedFrame: the bytes are no message of this direction, or a value is out of its range.
        """
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame(f"{self._name}: {len(frame)} bytes: {error}") from error


def client_to_core() -> Codec[ClientToCore]:
    """The codec of what clients send."""
    return Codec(ClientToCore, "client to core")


def core_to_client() -> Codec[CoreToClient]:
    """The codec of what clients receive."""
    return Codec(CoreToClient, "core to client")


def core_to_executor() -> Codec[CoreToExecutor]:
    """The codec of what an executor receives."""
    return Codec(CoreToExecutor, "core to executor")


def executor_to_core() -> Codec[ExecutorToCore]:
    """The codec of what an executor sends."""
    return Codec(ExecutorToCore, "executor to core")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as packed little-endian int32.

    Raises:
        OverflowError: an id does not fit 32 bits.
    """
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> array[int]:
    """Token ids out of packed little-endian int32.

    Raises:
        MalformedFrame: the length is no multiple of four.
    """
    ids = array("i")
    try:
        ids.frombytes(packed)
    except ValueError as error:
        raise MalformedFrame(f"token ids: {len(packed)} bytes is no multiple of 4") from error
    return ids
