"""Messages survive the wire, old bytes stay readable, and no bytes do harm."""

from __future__ import annotations

import contextlib
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_core.wire import client, codec, executor
from engine_core.wire.codec import Codec, pack_ids, unpack_ids
from engine_core.wire.errors import MalformedFrame
from engine_core.wire.reports import KernelCandidate, KernelChoice, LoadReport, TensorRecord
from engine_core.wire.sampling import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, SamplingParams

CODECS: list[Codec[Any]] = [
    codec.client_to_core(),
    codec.core_to_client(),
    codec.core_to_executor(),
    codec.executor_to_core(),
]
CLIENT_TO_CORE, CORE_TO_CLIENT, CORE_TO_EXECUTOR, EXECUTOR_TO_CORE = CODECS

PARAMS = SamplingParams(
    temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**63 - 1, max_tokens=9, min_tokens=1, stop_token_ids=(7, 8)
)
LOGPROBS = client.TokenLogprobs(-0.5, [1, 2], [-0.5, -1.5])
OUTPUT = client.Output(
    "r1", [5], "stop", 5, [LOGPROBS], cached_tokens=16, times=client.RequestTimes(0.5, 1.5, 2.5, 1), error="why"
)
KERNELS = [
    KernelChoice("attention", "cpu", "sdpa", [KernelCandidate("triton", ["no cuda"]), KernelCandidate("sdpa", [])])
]
LOAD = LoadReport(
    model="m",
    revision="r",
    layer_map=[0, 2],
    tensors=[TensorRecord("w", "loaded", ["w"], "model.safetensors", 4, "bfloat16", "float32")],
    shards_opened=["model.safetensors"],
    shards_skipped=[],
    bytes_read=2,
    bytes_materialized=4,
    counts={"loaded": 1},
    page_cache=None,
    seconds={"plan": 0.5},
)
MODEL = client.Model("m", 128, 512, (1, 2), "float32", 64, 16)

MESSAGES: list[tuple[Codec[Any], Any]] = [
    (CLIENT_TO_CORE, client.Hello(1, "python")),
    (CLIENT_TO_CORE, client.Submit("r1", pack_ids([1, 2]), PARAMS, -5, "salt", pack_ids([3]))),
    (CLIENT_TO_CORE, client.Abort(["r1", "r2"])),
    (CLIENT_TO_CORE, client.Ping(7)),
    (CLIENT_TO_CORE, client.Bye()),
    (CLIENT_TO_CORE, client.Drain()),
    (CLIENT_TO_CORE, client.Inspect(7)),
    (CORE_TO_CLIENT, client.Welcome(1, "0123456789abcdef", "loading", "m")),
    (CORE_TO_CLIENT, client.Progress("load", 5, 10, "bytes")),
    (CORE_TO_CLIENT, client.Ready(MODEL, LOAD, KERNELS, {"load": 1.5}, 1)),
    (CORE_TO_CLIENT, client.Outputs(3, [OUTPUT])),
    (CORE_TO_CLIENT, client.Rejected("r1", "context_length", "too long", "prompt", 128, 129, 0.5)),
    (CORE_TO_CLIENT, client.Status(7, "ready", "", 1, 2, 3, 4, {"capacity": 4}, 0.5, finished={"stop": 1})),
    (CORE_TO_CLIENT, client.Inspection(7, 1, 2, 3, 6, ["off by one"])),
    (CORE_TO_CLIENT, client.Fatal("executor_died", "executor (pid 1) ended: signal 9")),
    (
        CORE_TO_EXECUTOR,
        executor.StepPlan(
            1,
            2,
            [executor.SlotFill(0, pack_ids([1, 2]), 2, PARAMS, 11, [4, 5])],
            [executor.Row(0, 1, 1, [6], sample=True)],
        ),
    ),
    (CORE_TO_EXECUTOR, executor.Shutdown()),
    (EXECUTOR_TO_CORE, executor.ExecutorHello(1, "0123456789abcdef", 1, 99)),
    (EXECUTOR_TO_CORE, client.Progress("warm_up", 1, 2)),
    (
        EXECUTOR_TO_CORE,
        executor.ExecutorReady(1, 128, 512, "float32", "cpu", 64, 512, LOAD, KERNELS, {"load": 1.5}, {"weights": 4}),
    ),
    (EXECUTOR_TO_CORE, executor.StepResult(1, 2, [5], [LOGPROBS], 10, 20)),
    (EXECUTOR_TO_CORE, executor.StepResult(1, 2, [5, 6], [None, LOGPROBS], 10, 20)),
    (EXECUTOR_TO_CORE, executor.ExecutorFatal("refused", "dtype")),
]


def name_of(value: object) -> str:
    return type(value).__name__


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


def test_sampling_params_take_no_field_they_do_not_know() -> None:
    """A parameter that this core cannot honour must not be ignored."""
    fields = msgspec.msgpack.decode(CLIENT_TO_CORE.encode(client.Submit("r1", b"", PARAMS)))
    fields[3].append(1.5)
    with pytest.raises(MalformedFrame, match="length"):
        CLIENT_TO_CORE.decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    ("direction", "message", "golden"),
    [
        (CLIENT_TO_CORE, client.Hello(1, "http"), "93a568656c6c6f01a468747470"),
        (CLIENT_TO_CORE, client.Abort(["a"]), "92a561626f727491a161"),
        (CORE_TO_CLIENT, client.Fatal("shutdown", "x"), "93a5666174616ca873687574646f776ea178"),
        (
            CORE_TO_EXECUTOR,
            executor.StepPlan(1, 2, [], [executor.Row(0, 4, 1, [6], sample=True)]),
            "95a4706c616e010290919500040191" + "06c3",
        ),
        (EXECUTOR_TO_CORE, executor.StepResult(1, 2, [300], None, 1, 2), "97a6726573756c74010291cd012cc00102"),
    ],
    ids=name_of,
)
def test_golden_bytes(direction: Codec[Any], message: object, golden: str) -> None:
    """Another build must read these; changing them means another protocol version."""
    assert direction.encode(message).hex() == golden
    assert direction.decode(bytes.fromhex(golden)) == message


def with_params(**changes: object) -> bytes:
    fields = {**msgspec.structs.asdict(SamplingParams()), **changes}
    return msgspec.msgpack.encode(["submit", "r1", b"", list(fields.values())])


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -2},
        {"top_k": 2**31},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [0] * (MAX_STOP_TOKEN_IDS + 1)},
        {"logprobs": MAX_LOGPROBS + 1},
        {"logprobs": True},
    ],
    ids=str,
)
def test_sampling_limits(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedFrame):
        CLIENT_TO_CORE.decode(with_params(**changes))


def test_sampling_limits_are_inclusive() -> None:
    edges = {"temperature": 2, "top_k": -1, "top_p": 0, "seed": 2**63 - 1, "logprobs": MAX_LOGPROBS}
    message = CLIENT_TO_CORE.decode(with_params(**edges, stop_token_ids=[0] * MAX_STOP_TOKEN_IDS))
    assert message.params.seed == 2**63 - 1


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
