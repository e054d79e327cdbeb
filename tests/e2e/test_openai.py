"""The official openai client against a real server on CHAIN."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.scripts import CHAT_TEXT, LINES_TEXT, STOPS_TEXT, alphabet
from tests.e2e.server import Server

MESSAGES: Any = [{"role": "user", "content": "hi"}]
STREAMS = 32


@pytest.fixture(scope="module")
def client(chain_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chain_server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["chain"]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chain", messages=MESSAGES, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content == CHAT_TEXT
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_chat_stream_equals_the_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="chain", messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == CHAT_TEXT
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chain", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3, max_tokens=4
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    for entry in content:
        assert -1e-3 < entry.logprob <= 0
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 3
    assert b"".join(bytes(entry.bytes or []) for entry in content) == "Hello there \U0001f600".encode()


@pytest.mark.parametrize("prompt", ["say 0", [*b"say 0"]])
def test_completion_of_text_and_ids(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="chain", prompt=prompt, temperature=0, max_tokens=100)
    assert answer.choices[0].text == LINES_TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_completion_of_lists_keeps_their_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chain", prompt=["a", "k", "y"], temperature=0, max_tokens=5, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [alphabet(letter, 5) for letter in "aakkyy"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_stream_frames_survive_line_splitters(chain_server: Server) -> None:
    body = {"model": "chain", "prompt": "0", "temperature": 0, "stream": True, "max_tokens": 100}
    response = chain_server.post("/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    for lines in (response.text.splitlines(), response.text.split("\n")):
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        parts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(parts) == LINES_TEXT
        assert all(parts[:-1])


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["DEFGHIJ"], "ABC"),
        ("BCD", "A"),
        (["K", "GH"], "ABCDEF"),
        (["nothing"], STOPS_TEXT),
        (["EF", "F", "CDEFG"], "ABCD"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_at_their_first_character(client: openai.OpenAI, stop: Any, text: str, stream: bool) -> None:
    given: Any = {"model": "chain", "prompt": "1", "temperature": 0, "stop": stop, "max_tokens": 50}
    if stream:
        chunks = list(client.completions.create(**given, stream=True))
        parts = [chunk.choices[0].text for chunk in chunks]
        assert "".join(parts) == text
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        answer = client.completions.create(**given)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")


def test_stop_token_and_special_tokens(chain_server: Server) -> None:
    body = {"model": "chain", "prompt": "2", "temperature": 0, "max_tokens": 3}
    plain = chain_server.post("/v1/completions", body).json()["choices"][0]
    assert (plain["text"], plain["finish_reason"]) == ("x1y1", "length")
    stopped = chain_server.post("/v1/completions", {**body, "stop_token_ids": [259]}).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("x1", "stop")


def test_many_streams_at_once_are_exact(client: openai.OpenAI) -> None:
    letters = [chr(ord("a") + index % 26) for index in range(STREAMS)]

    def run(letter: str) -> tuple[str, int]:
        stream = client.completions.create(
            model="chain", prompt=f"{letter * 9}", temperature=1, max_tokens=100, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        assert chunks[-1].usage is not None
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-1].usage.completion_tokens

    with ThreadPoolExecutor(STREAMS) as pool:
        results = list(pool.map(run, letters))
    assert results == [(alphabet(letter, 100), 100) for letter in letters]


def test_usage_of_several_choices_is_a_sum(client: openai.OpenAI) -> None:
    given: Any = {"model": "chain", "prompt": "hello", "n": 3, "max_tokens": 7, "temperature": 1}
    whole = client.completions.create(**given)
    chunks = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 21, 26)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 21
    reasons = [
        (choice.index, choice.finish_reason) for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ]
    assert sorted(reasons) == [(0, "length"), (1, "length"), (2, "length")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", 9), ("top_p", -1), ("n", 0), ("max_tokens", -1), ("stop", [""]), ("stop_token_ids", [512])),
        *(("logprobs", 10**6), ("prompt", [512]), ("prompt", []), ("prompt", 5), ("top_k", -2), ("min_p", 2)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_refused_as_openai_does(chain_server: Server, field: str, value: Any, stream: bool) -> None:
    body = {"model": "chain", "prompt": "a", "max_tokens": 3, field: value, "stream": stream}
    response = chain_server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert field in error["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"model": "chain", "prompt": "a", "temperature": NaN}'])
def test_bodies_that_are_no_request(chain_server: Server, body: bytes) -> None:
    response = httpx.post(f"{chain_server.url}/v1/completions", content=body, timeout=10)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_client_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="chain", messages=MESSAGES, temperature=9)
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model="chain", prompt=[97] * 1024, max_tokens=1)


def test_longest_prompt_gives_one_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chain", prompt=[97] * 1023, temperature=0, max_tokens=10)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("b", "length")


def test_health_and_metrics_agree_after_all_that(chain_server: Server) -> None:
    for path in ("/health", "/live", "/ready", "/version"):
        assert httpx.get(f"{chain_server.url}{path}", timeout=10).status_code == 200
    assert "num_requests_running" in httpx.get(f"{chain_server.url}/metrics", timeout=10).text
