"""Server-sent events: framing, comments in silence, stalls, errors in mid-stream, many at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from engine_core.wire.client import Rejected
from frontend.api import sse
from frontend.config import HttpOptions
from tests.fakes.live import LiveServer, eventually, parse_events, strict

TEXT = "one\n\r\u2028\u2029\x85\x00two"
PATHS = ("/v1/completions", "/v1/chat/completions")


class Line(Struct):
    """Some event."""

    text: str


def body(path: str, text: str = "a", **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
    return {**prompt, "stream": True, **fields}


def test_an_event_is_one_line_for_every_parser() -> None:
    text = "".join(map(chr, (*range(0x300), *range(0x2000, 0x2100)))) + "\U0001f600"
    event = sse.event(Line(text)).decode()
    assert len(event.splitlines()) == 2
    assert event.endswith("\n\n")
    assert json.loads(event.removeprefix("data: ")) == {"text": text}


def test_line_ends_in_the_text_do_not_cut_events(live: LiveServer) -> None:
    answer = live.post(PATHS[0], body(PATHS[0], "B", max_tokens=20))
    by_lines = [line for line in answer.content.decode().splitlines() if line]
    by_newlines = [line for line in answer.content.decode().split("\n") if line]
    assert by_lines == by_newlines
    assert "".join(event["choices"][0]["text"] for event in parse_events(answer.content)) == TEXT
    assert live.complete("B", max_tokens=20)["choices"][0]["text"] == TEXT


class Recorder:
    """Keeps what is sent; while `gate` is cleared, sending waits."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, message: Any) -> None:
        await self.gate.wait()
        self.sent.append(message.get("body", b""))


def test_comments_fill_silence_only() -> None:
    async def main() -> list[bytes]:
        send = Recorder()
        times = iter([0.0, 4.9, 5.1, 5.1, 5.1, 10.0, 10.2, 10.2, 10.2, 12.0, 100.0])
        writer = sse.EventWriter(send, 5.0, clock=lambda: next(times))
        await writer.start({})
        for _ in range(4):
            assert not await writer.tick()
        await writer.end(b"last")
        assert not await writer.tick()
        return send.sent[1:]

    assert asyncio.run(main()) == [sse.PING, sse.PING, b"last"]


def test_a_write_that_waits_too_long_is_told() -> None:
    async def main() -> list[bool]:
        send = Recorder()
        times = iter([0.0, 1.0, sse.STALL_S, sse.STALL_S + 1.1])
        writer = sse.EventWriter(send, 0.0, clock=lambda: next(times))
        await writer.start({})
        send.gate.clear()
        writing = asyncio.create_task(writer.write(b"x"))
        await asyncio.sleep(0)
        told = [await writer.tick(), await writer.tick()]
        writing.cancel()
        return told

    assert asyncio.run(main()) == [False, True]


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_dies_is_an_error_in_the_stream(tmp_path: Path, path: str) -> None:
    with LiveServer(tmp_path) as live:
        live.core.step_s = 0.01
        with live.http.stream("POST", path, json=body(path, ignore_eos=True, max_tokens=900)) as answer:
            assert answer.status_code == 200
            events = []
            for line in answer.iter_lines():
                events += [line] if line else []
                if len(events) == 3:
                    live.call(lambda: live.core.die("executor_died", "the executor died"))
        last = json.loads(events[-1].removeprefix("data: "))
        assert last["error"]["code"] == "executor_died"
        assert "[DONE]" not in "".join(events)
        assert '"finish_reason":"stop"' not in "".join(events)
        assert live.http.get("/health").status_code == 503
        assert live.http.get("/live").status_code == 200
        assert live.post(path, body(path)).status_code == 503


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_dies_before_the_first_token(tmp_path: Path, path: str) -> None:
    with LiveServer(tmp_path) as live, concurrent.futures.ThreadPoolExecutor(2) as pool:
        live.call(live.core.gate.clear)
        asked = [pool.submit(live.post, path, {**body(path), "stream": stream}) for stream in (True, False)]
        eventually(lambda: len(live.core.live) == 2, "both requests are in the core")
        live.call(lambda: live.core.die("internal", "it broke"))
        streamed, plain = (each.result(10) for each in asked)
        assert plain.status_code == 503
        assert strict(plain.content)["error"]["message"] == "it broke"
        # The status line may have left before the engine died; then the error is an event.
        text = streamed.text.removeprefix("data: ")
        assert json.loads(text)["error"]["code"] == "internal"


def test_a_refusal_of_the_core_is_no_stream(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live:
        live.core.reject = lambda submit: Rejected(
            submit.request_id, "queue_full", "the queue is full", "max_num_queued_reqs", 8, 9, retry_after_s=1.5
        )
        for stream in (True, False):
            answer = live.post(PATHS[0], {"prompt": "a", "stream": stream, "n": 2})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "2"
            assert strict(answer.content)["error"]["code"] == "queue_full"
        assert live.metric("tercet_admission_rejections_total", reason="queue_full") == 2
        assert live.metric("tercet_request_success_total", finished_reason="error") == 0


def test_a_stream_in_silence_gets_comments(tmp_path: Path) -> None:
    with LiveServer(tmp_path, options=HttpOptions(sse_ping_interval=0.05)) as live:
        live.call(live.core.gate.clear)
        with live.http.stream("POST", PATHS[0], json=body(PATHS[0], max_tokens=2)) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": ping"
            live.call(live.core.gate.set)
            rest = [line for line in lines if line.startswith("data:")]
        assert rest[-1] == "data: [DONE]"


def test_many_streams_all_end(live: LiveServer) -> None:
    def one(number: int) -> None:
        path = PATHS[number % 2]
        length = number * 7 % 200 + 1
        fields: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "n": 1 + number % 3 // 2}
        if number % 5 == 0:
            fields["stop"] = ["de"]
        events = live.events(path, body(path, **fields))
        finishes = [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]]
        assert len(finishes) == fields["n"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(150)))
    eventually(lambda: not live.core.live, "the core has nothing left")
