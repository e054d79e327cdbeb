"""Messages in OpenAI's wire form, as templates get them."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.errors import InvalidRequest
from frontend.tokenizer.messages import joined, plain, prepared


def call(arguments: Any) -> dict[str, Any]:
    """An assistant message with one tool call."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def arguments_of(message: dict[str, Any]) -> Any:
    """The arguments of its tool call."""
    return message["tool_calls"][0]["function"]["arguments"]


def test_null_fields_are_left_out_and_developer_is_system() -> None:
    assert prepared([{"role": "developer", "content": "a", "name": None}]) == [{"role": "system", "content": "a"}]


@pytest.mark.parametrize("given", ["null", "", " ", "{}", None, {}])
def test_no_arguments(given: Any) -> None:
    assert arguments_of(prepared([call(given)])[0]) == {}


@pytest.mark.parametrize("given", ['{"a": [1, "\u00e9"]}', {"a": [1, "\u00e9"]}])
def test_arguments_are_parsed(given: Any) -> None:
    assert arguments_of(prepared([call(given)])[0]) == {"a": [1, "\u00e9"]}


@pytest.mark.parametrize("given", ["{", "[1]", "5", '"x"', [1], "[" * 100_000])
def test_wrong_arguments_are_named(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments") as caught:
        prepared([{"role": "user", "content": "a"}, call(given)])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("given", [[], None])
def test_no_tool_calls(given: Any) -> None:
    assert prepared([{"role": "assistant", "content": "a", "tool_calls": given}]) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize("given", ["x", {"function": 5}])
def test_a_tool_call_that_is_none(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"tool_calls\[0\]"):
        prepared([{"role": "assistant", "tool_calls": [given]}])


def test_content_parts() -> None:
    message = prepared([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}])[0]
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert joined(message["content"]) == "a\nb"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, {"text": "a"}, 5, None])
def test_other_parts_are_refused(part: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[0\]"):
        prepared([{"role": "user", "content": [part]}])


def test_reasoning_has_the_names_that_templates_read() -> None:
    message = prepared([{"role": "assistant", "content": "a", "reasoning": "b"}])[0]
    assert (message["reasoning_content"], message["thinking"]) == ("b", "b")


def test_the_messages_given_are_not_touched() -> None:
    given = call('{"a": 1}')
    prepared([given])
    assert arguments_of(given) == '{"a": 1}'


def test_every_text_is_made_valid() -> None:
    assert plain({"a\ud800": ["b\udc00", 1, None, True]}) == {"a\ufffd": ["b\ufffd", 1, None, True]}
