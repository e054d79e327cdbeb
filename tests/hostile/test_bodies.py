"""Bodies of any bytes and any JSON: a right answer or a 4xx, never a 5xx, a hang, or another process."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.live import eventually, strict
from tests.hostile.conftest import Stack
from tests.hostile.process import canary

PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])
RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))

# Text as JSON may spell it, halves of pairs and line ends among it.
ODD_TEXT = st.sampled_from(
    [
        *('"\\ud800"', '"a\\udc00b"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\\ufffe"', '"\\u2028"'),
        *('"<|end|>"', '""', '" "', '"{{ 7*7 }}"', '"\\uffff"', '"' + "e\u0301" * 500 + '"'),
    ]
)
NUMBERS = st.sampled_from(
    [
        *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "0.5", "-0", "-0.0", "2147483648", "1e308"),
        *("9223372036854775808", "-9223372036854775809", "9" * 400, "0x10", "1_000", "+1", ".5", "1.", "01", "1e3"),
    ]
)
PLAIN = st.sampled_from(
    ["null", "true", "false", "0", "1", "2", "-1", "[]", "{}", "[null]", '"a"', '["a"]', "[1]", "[[1,2]]"]
)
DEEP = st.integers(1, 3000).flatmap(
    lambda depth: st.sampled_from(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth])
)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
).map(json.dumps)
VALUE = ODD_TEXT | NUMBERS | PLAIN | DEEP | FREE
IDS = st.lists(st.integers(-3, 600) | st.integers(-(2**65), 2**65), max_size=6).map(json.dumps)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(['"user"', '"assistant"', '"system"', '"developer"', '"tool"', '"x"']) | VALUE},
    optional={"content": VALUE, "name": VALUE, "tool_calls": VALUE, "tool_call_id": VALUE, "refusal": VALUE},
)


def spelled(fields: dict[str, str]) -> str:
    """An object out of values that are JSON, or nearly so, already."""
    return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items()) + "}"


MESSAGES = st.lists(MESSAGE.map(spelled), max_size=4).map(lambda each: "[" + ",".join(each) + "]")
NAMES = (
    *("model", "stream", "stream_options", "n", "max_completion_tokens", "min_tokens", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "priority"),
    *("cache_salt", "skip_special_tokens", "return_token_ids", "add_special_tokens", "chat_template_kwargs"),
    *("continue_final_message", "add_generation_prompt", "include_stop_str_in_output", "echo", "logit_bias"),
    *("tools", "response_format", "user", "chat_template", "best_of", "suffix", "presence_penalty"),
    *("repetition_penalty", "prompt_logprobs", "foo", "\u2028"),
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """An object with a prompt or messages, and some fields of any kind."""
    fields = {"max_tokens": "2"}
    fields |= {name: draw(VALUE) for name in draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))}
    prompt = draw(st.sampled_from(['"ab"', "[97]", '["a","b"]', "[[1],[2]]"]) | VALUE | IDS)
    fields |= {"prompt": prompt, "messages": draw(MESSAGES | VALUE)}
    if draw(st.booleans()):
        fields["max_tokens"] = draw(NUMBERS | PLAIN)
    return spelled(fields).encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Such a body with bytes changed, added or cut."""
    data = bytearray(draw(bodies()))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


BODIES = bodies() | damaged() | st.binary(max_size=300)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "content-type": st.sampled_from(["application/json", "text/plain", "multipart/form-data; boundary=x", ""]),
        "content-encoding": st.sampled_from(["gzip", "identity", "br"]),
        "accept": st.sampled_from(["text/event-stream", "*/*", "x"]),
        "x-request-id": st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=200).map(str.strip),
    },
)


def ask(http: httpx.Client, path: str, body: bytes, headers: dict[str, str]) -> None:
    """Ask, and check what comes.

    Raises:
        AssertionError: a 5xx, or a refusal that is no proper one.
    """
    answer = http.post(path, content=body, headers=headers)
    encoded = headers.get("content-encoding", "identity") != "identity"
    statuses = (415,) if encoded else (200, 400, 404)
    assert answer.status_code in statuses, (path, body[:300], answer.status_code, answer.text[:300])
    if answer.status_code != 200:
        error = strict(answer.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
    elif not answer.headers["content-type"].startswith("text/event-stream"):
        strict(answer.content)


def settle(stack: Stack, pids: list[int], said: str) -> None:
    """Nothing is left, nobody died, and the canary sings the same."""
    stack.settle()
    assert [stack.core.child.pid, stack.core.executor_pid] == pids
    assert canary(stack.live.http) == said


@pytest.fixture
def watched(stack: Stack) -> Any:
    """The stack, checked before and after."""
    pids, said = [stack.core.child.pid, stack.core.executor_pid], canary(stack.live.http)
    yield stack
    settle(stack, pids, said)


@settings(RELAXED, max_examples=400)
@given(path=PATHS, body=BODIES, headers=HEADERS)
def test_any_body(watched: Stack, path: str, body: bytes, headers: dict[str, str]) -> None:
    ask(watched.live.http, path, body, headers)


@pytest.mark.slow
@settings(RELAXED, max_examples=10_000)
@given(path=PATHS, body=BODIES, headers=HEADERS)
def test_ten_thousand_bodies(watched: Stack, path: str, body: bytes, headers: dict[str, str]) -> None:
    ask(watched.live.http, path, body, headers)


METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
WORDS = st.sampled_from(
    ["v1", "models", "completions", "chat", "metrics", "..", ".", "", "%2e%2e", "%00", "%ff", "a" * 50, "%C3%A9", "*"]
)


@settings(RELAXED, max_examples=200)
@given(method=METHODS, words=st.lists(WORDS, max_size=6), query=st.binary(max_size=20))
def test_any_path_and_method(watched: Stack, method: str, words: list[str], query: bytes) -> None:
    target = f"{'/'.join(['', *words])}?q={query.hex()}".encode()
    answer = watched.live.http.request(method, httpx.URL(watched.live.url).copy_with(raw_path=target))
    assert answer.status_code in (200, 400, 404, 405), (method, words)


def test_neighbours_of_bad_requests_are_unchanged(stack: Stack) -> None:
    """The same greedy answers while thousands of bytes of nonsense come in beside them."""
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    alone = stack.live.post("/v1/completions", body).json()["choices"]
    for bad in (
        b"NaN",
        b"[" * 10_000,
        b'{"prompt": [512]}',
        b'{"prompt": "a", "stop_token_ids": [99999]}',
        b"\xff" * 1000,
    ):
        assert stack.live.post("/v1/completions", bad).status_code == 400
        assert stack.live.post("/v1/completions", body).json()["choices"] == alone
    eventually(stack.is_empty, "nothing is left")


@pytest.mark.parametrize(
    ("head", "statuses"),
    [
        (b"content-length: 500000000", (413,)),
        (b"content-length: " + b"9" * 19, (413,)),
        (b"content-length: " + b"9" * 5000, (400, 413, 431)),
        (b"content-length: -1", (400,)),
        (b"content-length: 1e3", (400,)),
        (b"content-length: 3\r\ncontent-length: 4", (400,)),
        (b"content-length: 3\r\ntransfer-encoding: chunked", (400,)),
        (b"transfer-encoding: gzip, chunked", (400, 501)),
        (b"transfer-encoding: x", (400, 501)),
        (b"expect: 100-continue\r\ncontent-length: 500000000", (413,)),
    ],
    ids=lambda value: value[:40].decode() if isinstance(value, bytes) else "",
)
def test_lengths_that_lie_are_refused_before_the_body(
    stack: Stack, dial: Any, head: bytes, statuses: tuple[int, ...]
) -> None:
    connection = dial(stack.live.url)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\nxxx")
    answer = connection.recv(65536)
    assert int(answer.split(b" ")[1]) in statuses, answer
    assert canary(stack.live.http)
