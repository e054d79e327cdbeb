"""POST /v1/chat/completions: shapes, streams, templates, log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.core import MAX_LEN
from tests.fakes.live import LiveServer, strict

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def test_an_answer(live: LiveServer) -> None:
    answer = live.chat("hi", max_tokens=4)
    assert answer["object"] == "chat.completion"
    # The template ends with a line break, after which the model says "abc...".
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abcd", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]


def test_stream_deltas_have_the_shape_that_clients_check(live: LiveServer) -> None:
    events = live.events(PATH, {"messages": USER, "max_tokens": 4, "n": 2})
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    for index in range(2):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert all(choice["delta"].get("content", "") is not None for choice in choices)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "abcd"


def test_the_room_is_the_default_limit(live: LiveServer) -> None:
    answer = live.chat("hi", ignore_eos=True)
    usage = answer["usage"]
    assert usage["total_tokens"] == MAX_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_have_the_shape_of_chat(live: LiveServer) -> None:
    content = live.chat("hi", max_tokens=2, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b"]
    assert content[0]["bytes"] == [97]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "b", "c"]
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
    bare = live.chat("hi", max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert bare[0]["top_logprobs"] == []
    assert live.chat("hi", max_tokens=1, logprobs=False)["choices"][0]["logprobs"] is None


def test_joined_bytes_are_the_text(live: LiveServer) -> None:
    messages = [*USER, {"role": "assistant", "content": "D"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 3, "logprobs": True, "top_logprobs": 5}
    answer = strict(live.post(PATH, body).content)["choices"][0]
    assert answer["message"]["content"] == "\U0001f600cut"
    assert bytes(b for e in answer["logprobs"]["content"] for b in e["bytes"]).decode() == answer["message"]["content"]


def test_parts_and_text_are_one(live: LiveServer) -> None:
    for role in ("system", "developer", "user", "assistant"):
        as_text = [{"role": role, "content": "hi"}, *USER]
        as_parts = [{"role": role, "content": [{"type": "text", "text": "hi"}]}, *USER]
        counts = [
            strict(live.post(PATH, {"messages": messages, "max_tokens": 1}).content)["usage"]["prompt_tokens"]
            for messages in (as_text, as_parts)
        ]
        assert counts[0] == counts[1], role


def test_a_last_assistant_message_is_continued(live: LiveServer) -> None:
    messages = [*USER, {"role": "assistant", "content": "xab"}]
    body = {"messages": messages, "max_tokens": 2, "continue_final_message": True, "add_generation_prompt": False}
    answer = strict(live.post(PATH, body).content)
    assert answer["choices"][0]["message"]["content"] == "cd"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "function", "name": "f", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "a" * 3 * MAX_LEN}]}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused_with_the_field_at_fault(live: LiveServer, fields: dict[str, Any], param: str, stream: bool) -> None:
    before = len(live.core.submits)
    answer = live.post(PATH, {"messages": USER, "stream": stream, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert strict(answer.content)["error"]["param"] == param
    assert len(live.core.submits) == before


def test_harmless_variables_reach_the_template(live: LiveServer) -> None:
    assert live.chat("hi", max_tokens=1, chat_template_kwargs={"enable_thinking": False})["choices"]


@pytest.mark.parametrize("depth", [10, 500, 900, 5000])
@pytest.mark.parametrize("place", ["variables", "arguments", "text"])
def test_deep_nesting_is_answered(live: LiveServer, depth: int, place: str) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    call = '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}'
    fields = {
        "variables": '"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": ' + deep,
        "arguments": '"messages": [' + call % deep + "]",
        "text": '"messages": [' + call % json.dumps(deep) + "]",
    }
    answer = live.post(PATH, ('{"max_tokens": 1, ' + fields[place] + "}").encode())
    assert answer.status_code in ((200,) if depth == 10 else (200, 400)), answer.text
    assert live.http.get("/health").status_code == 200


def test_tool_history_with_odd_arguments(live: LiveServer) -> None:
    def ask(arguments: Any) -> int:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": "1", "content": "5"}]
        return live.post(PATH, {"messages": messages, "max_tokens": 1}).status_code

    odd: list[Any] = ["null", "", "{}", {}, None, "{", "5"]
    assert [ask(arguments) for arguments in odd] == [200] * 5 + [400] * 2
