"""The engine core over the real wire: a core process, the fake executor below it, clients at its socket."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest

from engine_core.wire import codec
from engine_core.wire.client import (
    PROTOCOL,
    Abort,
    Bye,
    Fatal,
    Hello,
    Inspect,
    Inspection,
    Ping,
    Ready,
    RejectCode,
    Rejected,
    Submit,
    Welcome,
)
from engine_core.wire.config import (
    EngineConfig,
    SchedulerOptions,
    config_hash,
)
from engine_core.wire.sampling import SamplingParams
from tests.fakes.core_process import ENDLESS, RunningCore, WireClient, fake_model, running_core
from tests.fakes.executor import continuation
from tests.fakes.waiting import until

CONFIG = EngineConfig(model=fake_model("delay_s=0.002"), scheduler=SchedulerOptions(max_num_seqs=8))


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCore]:
    """A core that the tests of this module share: each must leave it idle."""
    with running_core(tmp_path_factory.mktemp("core"), CONFIG) as running:
        yield running


@pytest.fixture
def client(core: RunningCore) -> Iterator[WireClient]:
    """A connected client; the core is idle, and its books are right, when the test is over."""
    client = core.client()
    client.connect()
    yield client
    client.send(Bye())
    watcher = core.client()
    watcher.connect()
    until("the core is idle", lambda: idle(watcher))
    watcher.send(Inspect(1))
    inspection = watcher.expect(Inspection)
    assert inspection.violations == []
    assert inspection.owned == 0
    assert inspection.free + inspection.cached == inspection.total == 256
    watcher.send(Bye())


def idle(client: WireClient) -> bool:
    status = client.status()
    return status.running == status.waiting == 0 and status.step_age_s == 0.0


def test_a_stream_of_tokens(client: WireClient) -> None:
    client.submit("a", [1, 2, 3])
    assert client.finish("a") == continuation([1, 2, 3], 8)
    outputs = client.outputs["a"]
    assert [output.finish for output in outputs] == [None] * 7 + ["length"]
    assert [len(output.token_ids) for output in outputs] == [1] * 8
    times = outputs[-1].times
    assert times is not None
    assert times.decode >= 7 * 0.002


def test_many_streams_at_once(client: WireClient) -> None:
    prompts = {f"r{i}": list(range(i, i + 5 + 3 * i)) for i in range(24)}
    for request_id, prompt in prompts.items():
        client.submit(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=20))
    for request_id, prompt in prompts.items():
        assert client.finish(request_id) == continuation(prompt, 20)


def test_a_prompt_of_several_chunks(client: WireClient) -> None:
    prompt = [i % 512 for i in range(1000)]
    client.submit("long", prompt)
    assert client.finish("long") == continuation(prompt, 8)


def test_one_message_holds_what_a_step_gave_a_client(client: WireClient) -> None:
    for name in ("a", "b"):
        client.start(name)
    batches = [client.receive() for _ in range(10)]
    assert all({output.request_id for output in getattr(batch, "items", [])} == {"a", "b"} for batch in batches)


def test_logprobs_are_sent_where_asked(client: WireClient) -> None:
    client.submit("with", [1], SamplingParams(temperature=0.0, max_tokens=3, logprobs=2))
    client.submit("without", [1], SamplingParams(temperature=0.0, max_tokens=3))
    assert client.finish("with") == client.finish("without")
    assert [len(output.logprobs or []) for output in client.outputs["with"]] == [1, 1, 1]
    assert [output.logprobs for output in client.outputs["without"]] == [None, None, None]


def test_a_cached_prompt_gives_the_same_tokens(client: WireClient) -> None:
    prompt = list(range(100, 200))
    client.submit("first", prompt)
    client.finish("first")
    client.submit("second", prompt)
    assert client.finish("second") == client.tokens("first") == continuation(prompt, 8)
    assert client.outputs["second"][-1].cached_tokens == 96


def test_abort_ends_with_one_last_output(client: WireClient) -> None:
    client.start("a")
    client.send(Abort(["a", "unknown"]))
    while not client.ended("a"):
        client.receive()
    assert client.outputs["a"][-1].finish == "abort"
    client.send(Abort(["a"]))
    seen = len(client.outputs["a"])
    client.status()
    assert len(client.outputs["a"]) == seen
    assert client.tokens("a") == continuation([1, 2, 3], len(client.tokens("a")))


def test_an_id_is_free_again_after_its_end(client: WireClient) -> None:
    client.submit("a", [1])
    client.finish("a")
    client.outputs.clear()
    client.submit("a", [2])
    assert client.finish("a") == continuation([2], 8)


def test_a_live_id_is_refused_and_goes_on(client: WireClient) -> None:
    client.start("a")
    client.submit("a", [9])
    assert client.expect(Rejected).code == "duplicate_id"
    seen = len(client.tokens("a"))
    while len(client.tokens("a")) <= seen:
        client.receive()
    client.send(Abort(["a"]))


def test_two_clients_with_equal_ids(core: RunningCore, client: WireClient) -> None:
    other = core.client()
    other.connect()
    client.submit("same", [1, 2, 3])
    other.submit("same", [4, 5])
    assert client.finish("same") == continuation([1, 2, 3], 8)
    assert other.finish("same") == continuation([4, 5], 8)
    client.start("same2")
    other.start("same2")
    other.send(Abort(["same2"]))
    while not other.ended("same2"):
        other.receive()
    seen = len(client.tokens("same2"))
    while len(client.tokens("same2")) < seen + 3:
        client.receive()
    other.send(Bye())


@pytest.mark.parametrize(
    ("submit", "code"),
    [
        (Submit("bad", codec.pack_ids([512]), ENDLESS), "invalid"),
        (Submit("bad", codec.pack_ids([-1]), ENDLESS), "invalid"),
        (Submit("bad", b"\x01\x02\x03", ENDLESS), "invalid"),
        (Submit("bad", b"", ENDLESS), "invalid"),
        (Submit("bad", codec.pack_ids([1] * 1024), ENDLESS), "context_length"),
        (Submit("bad", codec.pack_ids([1]), SamplingParams(stop_token_ids=(512,))), "invalid"),
        (Submit("bad", codec.pack_ids([1]), SamplingParams(temperature=9.0)), "invalid"),
        (Submit("bad", codec.pack_ids([1]), SamplingParams(top_p=float("nan"))), "invalid"),
    ],
)
def test_an_invalid_request_is_refused_alone(client: WireClient, submit: Submit, code: RejectCode) -> None:
    client.start("good")
    before = client.status()
    client.send(submit)
    rejected = client.expect(Rejected)
    assert (rejected.request_id, rejected.code) == ("bad", code)
    after = client.status()
    assert after.rejected.get(code, 0) == before.rejected.get(code, 0) + 1
    assert after.running == 1


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x80\x04\x95cposix\nsystem\n."],
        [b"\xc1" * 1000],
        [b"\x91" * 100_000],
        [b"\x92\xa4ping\xa1x"],
        [b"", b""],
    ],
    ids=["empty", "pickle", "noise", "deep", "wrong type", "two frames"],
)
def test_garbage_is_counted_and_dropped(core: RunningCore, client: WireClient, frames: list[bytes]) -> None:
    client.start("a")
    before = client.status().malformed_frames
    client.socket.send_multipart(frames)
    assert client.status().malformed_frames == before + 1
    stranger = core.client()
    stranger.socket.send_multipart(frames)
    until("the stranger's frame is counted", lambda: client.status().malformed_frames == before + 2)
    assert stranger.silent_for(0.0)
    client.send(Abort(["a"]))


def test_a_frame_of_fifty_megabytes(client: WireClient) -> None:
    before = client.status().malformed_frames
    client.socket.send(bytes(50 * 2**20))
    until("the frame is counted", lambda: client.status().malformed_frames == before + 1)


def test_strangers_must_say_hello_first(core: RunningCore, client: WireClient) -> None:
    before = client.status()
    stranger = core.client()
    stranger.submit("a", [1])
    stranger.send(Ping(1))
    until("both are counted", lambda: client.status().malformed_frames == before.malformed_frames + 2)
    assert stranger.silent_for(0.0)
    assert sum(client.status().finished.values()) == sum(before.finished.values())


def test_another_protocol_version_is_told_and_ignored(core: RunningCore, client: WireClient) -> None:
    other = core.client()
    other.send(Hello(PROTOCOL + 1, "newer"))
    assert other.expect(Welcome).protocol == PROTOCOL
    told = other.receive()
    assert isinstance(told, Fatal)
    assert told.code == "protocol"
    assert told.message == f"protocol: expected {PROTOCOL}, the peer has {PROTOCOL + 1}"
    before = client.status().malformed_frames
    other.submit("a", [1])
    until("its request is dropped", lambda: client.status().malformed_frames == before + 1)
    assert other.silent_for(0.0)


def test_hello_submit_and_bye_in_one_go(core: RunningCore, client: WireClient) -> None:
    """Messages are taken in order, however they arrive."""
    quick = core.client()
    quick.send(Hello(PROTOCOL, "quick"))
    quick.submit("a", [1, 2], SamplingParams(temperature=0.0, max_tokens=2))
    quick.send(Bye())
    quick.send(Hello(PROTOCOL, "quick"))
    quick.submit("b", [3, 4], SamplingParams(temperature=0.0, max_tokens=2))
    assert quick.finish("b") == continuation([3, 4], 2)
    assert not quick.tokens("a")
    quick.send(Bye())
    assert client.status().running == 0


def test_a_late_client_learns_all_at_once(core: RunningCore, client: WireClient) -> None:
    late = core.client()
    late.send(Hello(PROTOCOL, "late"))
    welcome, ready = late.receive(), late.receive()
    limit = CONFIG.deadlines.step_timeout
    assert welcome == Welcome(PROTOCOL, config_hash(CONFIG), "ready", CONFIG.model.model, os.getpid(), limit)
    assert isinstance(ready, Ready)
    assert ready.model.num_kv_blocks == 256
    assert ready.kernels[0].chosen == "fake"
    late.send(Bye())


def test_the_status_tells_what_happened(core: RunningCore, client: WireClient) -> None:
    before = client.status(41)
    assert (before.seq, before.state, before.reason, before.epoch) == (41, "ready", "", 1)
    assert before.executor_pid == core.executor_pid
    client.submit("a", [1, 2, 3])
    client.finish("a")
    after = client.status(42)
    assert after.finished["length"] == before.finished.get("length", 0) + 1
    assert after.generation_tokens == before.generation_tokens + 8
    assert after.prompt_tokens == before.prompt_tokens + 3
    assert after.steps - before.steps >= 8
    assert after.step_tokens - before.step_tokens >= 10
    assert after.step_time_s - before.step_time_s >= 8 * 0.002
    assert sum(after.step_time_buckets) == sum(after.step_token_buckets) == after.steps
    assert after.stale_results == 0


def test_a_client_that_leaves_ends_its_requests(core: RunningCore, client: WireClient) -> None:
    other = core.client()
    other.connect()
    for name in "abcdefghij":
        other.start(name) if name == "a" else other.submit(name, [1], ENDLESS)
    other.send(Bye())
    until("its requests have ended", lambda: idle(client))


def test_a_client_that_dies_ends_its_requests(core: RunningCore, client: WireClient) -> None:
    other = core.client()
    other.connect()
    other.start("a")
    other.close()
    until("its requests have ended", lambda: idle(client))


def test_a_client_that_never_reads_costs_bounded_memory(core: RunningCore, client: WireClient) -> None:
    other = core.client()
    other.connect()
    other.submit("a", [1], SamplingParams(temperature=0.0, max_tokens=1000))
    aborted = client.status().finished.get("abort", 0)
    before = psutil.Process(core.child.pid).memory_info().rss
    for seq in range(40_000):
        other.send(Ping(seq))
    until("it is removed", lambda: client.status().malformed_frames > 0 and idle(client))
    assert client.status().finished.get("abort", 0) == aborted + 1
    assert psutil.Process(core.child.pid).memory_info().rss - before < 64 * 2**20


def test_others_are_served_while_a_client_floods(core: RunningCore, client: WireClient) -> None:
    other = core.client()
    other.connect()
    for seq in range(3000):
        other.send(Ping(seq))
    began = time.monotonic()
    client.submit("a", [1, 2, 3])
    assert client.finish("a") == continuation([1, 2, 3], 8)
    assert time.monotonic() - began < 2.0
    other.send(Bye())
