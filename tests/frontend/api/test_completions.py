"""POST /v1/completions: forms of prompts, streams, stops, log-probabilities, limits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.core import MAX_LEN
from tests.fakes.live import LiveServer, strict

PATH = "/v1/completions"


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)


def test_a_text_is_continued(live: LiveServer) -> None:
    answer = live.complete("a", max_tokens=5)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "chain"
    assert answer["choices"] == [{"index": 0, "text": "bcdef", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 5,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["bc"]),
        (["a", "k", "y"], ["bc", "lm", "za"]),
        ([97], ["bc"]),
        ([[97], [107], [120, 121]], ["bc", "lm", "za"]),
    ],
)
def test_all_forms_of_prompts(live: LiveServer, prompt: Any, texts: list[str]) -> None:
    answer = live.complete(prompt, max_tokens=2, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))
    assert [choice["text"] for choice in answer["choices"]] == [text for text in texts for _ in range(2)]
    assert answer["usage"]["completion_tokens"] == 4 * len(texts)
    streamed = live.events(PATH, {"prompt": prompt, "max_tokens": 2, "n": 2})
    assert [joined(streamed, index) for index in range(2 * len(texts))] == [text for text in texts for _ in range(2)]


def test_two_hundred_prompts_in_one_body(live: LiveServer) -> None:
    answer = live.complete(["a"] * 200, max_tokens=1)
    assert [choice["text"] for choice in answer["choices"]] == ["b"] * 200


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}]
)
def test_no_usage_unless_asked(live: LiveServer, options: dict[str, Any]) -> None:
    events = live.events(PATH, {"prompt": "a", "max_tokens": 3, **options})
    assert all("usage" not in event and event["choices"] for event in events)


def test_usage_comes_once_and_last(live: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 7, "n": 3, "ignore_eos": True}
    events = live.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert [bool(event["choices"]) for event in events] == [True] * (len(events) - 1) + [False]
    assert [event for event in events if "usage" in event] == events[-1:]
    assert events[-1]["usage"]["completion_tokens"] == 21
    assert events[-1]["usage"]["prompt_tokens"] == 1
    assert events[-1]["usage"] == live.complete(**body)["usage"]
    finishes = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [(0, "length"), (1, "length"), (2, "length")]


def test_chunks_share_id_time_and_model(live: LiveServer) -> None:
    events = live.events(PATH, {"prompt": "a", "max_tokens": 3})
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["DEFGHIJ"], "ABC"),
        ("DEFGHIJ", "ABC"),
        (["K", "GH"], "ABCDEF"),
        (["CD"], "AB"),
        (["nothing", "J"], "ABCDEFGHI"),
        (["x" * 100_000], "ABCDEFGHIJK"),
        (None, "ABCDEFGHIJK"),
        ([], "ABCDEFGHIJK"),
    ],
)
def test_stop_strings_cut_at_their_first_character(live: LiveServer, stop: Any, text: str) -> None:
    body = {"prompt": "A", "max_tokens": 6, "stop": stop}
    answer = live.complete(**body)["choices"][0]
    assert answer["text"] == text
    events = live.events(PATH, body)
    assert joined(events) == text
    assert events[-1]["choices"][0]["finish_reason"] == answer["finish_reason"]
    assert answer["finish_reason"] == ("length" if text.endswith("K") else "stop")


def test_a_stop_string_may_stay_in_the_text(live: LiveServer) -> None:
    assert live.complete("E", max_tokens=1, stop=[".."])["choices"][0]["text"] == ""
    answer = live.complete("E", max_tokens=1, stop=[".."], include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == ".."
    assert answer["choices"][0]["stop_reason"] == ".."


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "xxyy"),
        ({"skip_special_tokens": False}, "xx<|tool|>yy"),
        ({"stop_token_ids": [259]}, "xx"),
    ],
)
def test_special_tokens(live: LiveServer, fields: dict[str, Any], text: str) -> None:
    body = {"prompt": "C", "max_tokens": 20, **fields}
    answer = live.complete(**body)
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert joined(live.events(PATH, body)) == text
    if "stop_token_ids" in fields:
        assert answer["choices"][0]["stop_reason"] == 259
    else:
        assert answer["usage"]["completion_tokens"] == 4


def test_logprobs_have_the_shape_of_completions(live: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 3, "logprobs": 2}
    logprobs = live.complete(**body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["b", "c", "d"]
    assert logprobs["token_logprobs"] == [-0.25] * 3
    assert logprobs["top_logprobs"] == [{"b": -0.25, "c": -0.5}, {"c": -0.25, "d": -0.5}, {"d": -0.25, "e": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2]
    events = live.events(PATH, body)
    assert [t for e in events for t in e["choices"][0]["logprobs"]["tokens"]] == ["b", "c", "d"]
    assert [t for e in events for t in e["choices"][0]["logprobs"]["text_offset"]] == [0, 1, 2]
    assert live.complete("a", max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -0.25}]


def test_parts_of_characters_keep_apart_in_logprobs(live: LiveServer) -> None:
    answer = live.complete("D", max_tokens=4, logprobs=1)["choices"][0]
    assert answer["text"] == "\U0001f600cut\ufffd"
    assert answer["logprobs"]["tokens"][:3] == ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "cut"]
    assert joined(live.events(PATH, {"prompt": "D", "max_tokens": 4})) == answer["text"]


def test_ids_are_returned_when_asked_for(live: LiveServer) -> None:
    choice = live.complete("ab", max_tokens=2, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [99, 100]
    assert choice["prompt_token_ids"] == [97, 98]
    events = live.events(PATH, {"prompt": "ab", "max_tokens": 2, "return_token_ids": True})
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == [99, 100]
    given = [event["choices"][0].get("prompt_token_ids") for event in events]
    assert given == [[97, 98], *[None] * (len(events) - 1)]


@pytest.mark.parametrize("limit", [None, 10 * MAX_LEN, 2**62])
def test_more_tokens_than_room_means_the_room(live: LiveServer, limit: int | None) -> None:
    prompt = "a" * (MAX_LEN - 3)
    for field in ("max_tokens", "max_completion_tokens"):
        answer = live.complete(prompt, **{field: limit})
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


def test_defaults_and_precedence_of_the_limit(live: LiveServer) -> None:
    assert live.complete("a")["usage"]["completion_tokens"] == 16
    assert live.complete("a", max_tokens=3, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("length", [MAX_LEN, MAX_LEN + 1, 3 * MAX_LEN])
@pytest.mark.parametrize("max_tokens", [None, 10])
def test_a_prompt_without_room_is_refused_with_the_numbers(
    live: LiveServer, length: int, max_tokens: int | None
) -> None:
    for prompt in ("a" * length, [97] * length):
        answer = live.post(PATH, {"prompt": prompt, "max_tokens": max_tokens})
        error = strict(answer.content)["error"]
        assert answer.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        assert str(MAX_LEN) in error["message"]
        assert str(length) in error["message"]
        assert "-" not in error["message"]


def test_the_longest_prompt_gives_one_token(live: LiveServer) -> None:
    assert live.complete("a" * (MAX_LEN - 1), max_tokens=10)["usage"]["completion_tokens"] == 1


def test_what_reaches_the_core(live: LiveServer) -> None:
    fields = {
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 1,
        "min_p": 0,
        "seed": -1,
        "max_tokens": 2,
        "min_tokens": 1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "priority": -3,
        "cache_salt": "salt",
        "logprobs": 3,
        "n": 2,
    }
    live.complete("a", **fields)
    first, second = live.core.submits[-2:]
    params = first.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, -1, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids) == (2, 1, (7,))
    assert (params.ignore_eos, params.logprobs, params.seed) == (True, 3, 2**63 - 1)
    assert (first.priority, first.cache_salt) == (-3, "salt")
    assert second.params.seed not in (None, params.seed)
    assert len({submit.request_id for submit in (first, second)}) == 2


def test_ids_of_a_client_are_in_the_headers_only(live: LiveServer) -> None:
    for given, echoed in (("mine-1", True), ("x" * 128, True), ("x" * 129, False)):
        answer = live.post(PATH, {"prompt": "a", "max_tokens": 1}, x_request_id=given)
        assert (answer.headers["x-request-id"] == given) is echoed
        assert given not in answer.text
