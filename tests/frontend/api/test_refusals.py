"""Bodies that must be refused, and those that must not: values, nulls, unknown and unsupported fields, odd bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frontend.api.fields import HARMLESS, REFUSED
from frontend.config import HttpOptions
from frontend.tokenizer import hf
from tests.fakes.live import LiveServer, strict

PATHS = {
    "/v1/completions": b'"prompt": "a", "max_tokens": 2',
    "/v1/chat/completions": b'"messages": [{"role": "user", "content": "a"}], "max_tokens": 2',
}
ANSWERS = {"/v1/completions": "bc", "/v1/chat/completions": "ab"}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def refuse(live: LiveServer, path: str, body: bytes) -> dict[str, Any]:
    """The error of a body that must be refused with 400 before anything is queued."""
    before = len(live.core.submits)
    answer = live.post(path, body)
    assert answer.status_code == 400, (body[:200], answer.text[:300])
    assert answer.headers["content-type"] == "application/json"
    assert len(live.core.submits) == before
    error = strict(answer.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    return dict(error)


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
BAD_NUMBERS = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"0.5"', b"true", b"[]", b"-1", b"3"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_numbers_that_are_none_or_out_of_range(live: LiveServer, path: str, field: str, value: bytes) -> None:
    error = refuse(live, path, b"{%b, %b: %b}" % (PATHS[path], json.dumps(field).encode(), value))
    assert field in error["message"] or "JSON" in error["message"] or "range" in error["message"]


BAD_VALUES: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", -1),
    ("n", 10**9),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_completion_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", "2"),
    ("max_completion_tokens", -1),
    ("min_tokens", -1),
    ("min_tokens", 3),
    ("temperature", 2.1),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_p", 1.5),
    ("seed", 2**63),
    ("seed", 0.5),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a", ""]),
    ("stop", [None]),
    ("stop", 5),
    ("stop", [1]),
    ("stop", ["x"] * 100_000),
    ("stop", ["x" * 300_000]),
    ("stop_token_ids", [512]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [1] * 257),
    ("stream_options", 5),
    ("stream_options", {"include_usage": "yes"}),
    ("stream_options", {"continuous_usage_stats": True}),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("cache_salt", "x" * 257),
    ("priority", "high"),
    ("priority", 2**31),
    ("stream", "yes"),
    ("ignore_eos", 1),
    ("best_of", 10**9),
    ("best_of", 2),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 0),
    ("logprobs", -1),
    ("logprobs", 10**6),
    ("logit_bias", {"512": 1}),
    ("logit_bias", {"1": -100}),
    ("echo", True),
    ("suffix", "x"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("guided_json", {}),
    ("guided_regex", "a+"),
    ("structured_outputs", {"regex": "a"}),
    ("use_beam_search", True),
    ("length_penalty", 0.5),
    ("bad_words", ["a"]),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("logits_processors", ["x"]),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_values_that_are_refused_by_name(live: LiveServer, path: str, field: str, value: Any) -> None:
    base = json.loads(b"{%b}" % PATHS[path])
    error = refuse(live, path, json.dumps({**base, field: value}).encode())
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        *(b'""', b'[""]', b"[]", b"[[]]", b'["a", ""]', b"null", b"5", b"{}", b"true"),
        *(b"[512]", b"[-1]", b"[5e18]", b"[2147483648]", b"[true]", b"[1.5]", b'[1, "a"]', b"[[1], [2, -7]]"),
        *(b'["a", [1]]', b"[" + b"512," * 10**6 + b"1]", b"[" + b'"a",' * 10**5 + b'"a"]'),
    ],
    ids=lambda prompt: prompt[:20].decode(),
)
def test_prompts_that_are_none(live: LiveServer, prompt: bytes) -> None:
    assert refuse(live, "/v1/completions", b'{"prompt": %b}' % prompt)["param"] == "prompt"


def test_a_missing_prompt(live: LiveServer) -> None:
    assert refuse(live, "/v1/completions", b"{}")["param"] == "prompt"
    assert refuse(live, "/v1/chat/completions", b"{}")["param"] == "messages"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"null", b"[]", b"5", b'"a"', b"{", b"{}}", b"{'a': 1}", b'{"a": 01}', b"\x00", b"\xff\xfe{}"),
        *(b'{"prompt": "\xff"}', b'{"user": "\xed\xa0\x80"}', b"[" * 100_000, b'{"a":' * 100_000),
        b'{"messages": [], "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        *(b'{"prompt": "\\ud800"}', b'{"stop": "a\\udc00b"}', b'{"user": "\\udc00\\ud800"}'),
    ],
    ids=range(20),
)
def test_bodies_that_are_no_request(live: LiveServer, path: str, body: bytes) -> None:
    refuse(live, path, body)


@pytest.mark.parametrize("path", PATHS)
def test_nulls_are_absent_fields(live: LiveServer, path: str) -> None:
    base = json.loads(b"{%b}" % PATHS[path])
    known = {*REFUSED, *HARMLESS, "stop", "seed", "n", "top_p", "temperature", "top_k", "min_p", "stream_options"}
    known |= {"max_completion_tokens", "min_tokens", "logprobs", "stream", "model", "ignore_eos", "priority"}
    for fields in (dict.fromkeys(known), *({name: None} for name in sorted(known))):
        answer = live.post(path, {**base, **fields})
        assert answer.status_code == 200, (fields, answer.text)
        assert text_of(strict(answer.content)) == ANSWERS[path]
        assert "x-ignored-fields" not in answer.headers


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 1},
        {"top_p": 1.0},
        {"top_p": 0},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 517},
        {"min_p": 0},
        {"min_p": 1},
        {"temperature": 1e-30},
        {"temperature": 0},
        {"repetition_penalty": 1},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"logit_bias": {}, "user": "", "tools": [], "functions": []},
        {"tool_choice": "none", "function_call": "none", "response_format": {"type": "text"}},
        {"best_of": 1, "echo": False, "suffix": "", "use_beam_search": False, "modalities": ["text"]},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"},
        {"parallel_tool_calls": True, "reasoning_effort": {"x": 1}, "prediction": {}, "verbosity": "low"},
        {"spaces_between_special_tokens": False, "seed": -(2**63), "n": 1, "stop": [], "min_tokens": 0},
        {"model": "alias"},
        {"stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_values_that_clients_send_by_default(live: LiveServer, path: str, fields: dict[str, Any]) -> None:
    answer = live.post(path, {**json.loads(b"{%b}" % PATHS[path]), **fields})
    assert answer.status_code == 200, answer.text
    assert text_of(strict(answer.content)) == ANSWERS[path]
    assert "x-ignored-fields" not in answer.headers


@pytest.mark.parametrize("path", PATHS)
def test_unknown_fields_are_named_in_the_header(live: LiveServer, path: str) -> None:
    body = b'{%b, "foo": 1, "a b\\n": {"deep": [1]}}' % PATHS[path]
    answer = live.post(path, body)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "foo, a%20b%0A"


def test_unknown_fields_of_messages_do_no_harm(live: LiveServer) -> None:
    extra: dict[str, Any] = {
        "id": "1",
        "opts": {},
        "refusal": None,
        "audio": None,
        "annotations": [],
        "function_call": None,
    }
    messages = [{"role": "user", "content": "a", **extra}]
    answer = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert text_of(strict(answer.content)) == "ab"


def test_strict_fields_refuses_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    with LiveServer(tmp_path_factory.mktemp("strict"), options=HttpOptions(strict_fields=True)) as live:
        assert refuse(live, "/v1/completions", b'{"prompt": "a", "foo": 1}')["param"] == "foo"
        assert live.complete("a", max_tokens=2, user="x")["choices"][0]["text"] == "bc"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model(live: LiveServer, path: str, stream: bool) -> None:
    body = {**json.loads(b"{%b}" % PATHS[path]), "model": "other\ud800"[:5], "stream": stream}
    answer = live.post(path, body)
    assert answer.status_code == 404
    assert strict(answer.content)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("text", ["\U0001f600", "\u0000", "\ufffe", "a" + "\u0301" * 200])
def test_odd_text_is_text(live: LiveServer, text: str) -> None:
    for fields in ({"prompt": text}, {"prompt": "a", "stop": text}, {"prompt": "a", "user": text}):
        assert live.post("/v1/completions", {**fields, "max_tokens": 1}).status_code == 200
    assert live.chat(text, max_tokens=1)["choices"]


def test_the_server_is_well_after_all_this(live: LiveServer) -> None:
    assert live.complete("a", max_tokens=3)["choices"][0]["text"] == "bcd"
    assert live.http.get("/health").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_text_far_too_long_is_refused_before_it_is_tokenized(
    live: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its length alone tells; megabytes cost no more than that."""

    def tokenize(*_: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(hf, "_ids", tokenize)
    text = json.dumps("word " * 400_000).encode()
    error = refuse(live, path, b"{%b}" % PATHS[path].replace(b'"a"', text))
    assert error["code"] == "context_length_exceeded"
    assert "the prompt is at least " in error["message"]
    assert "1024 tokens" in error["message"]
