"""Chat messages in OpenAI's wire form, made ready for templates, which expect what transformers gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from frontend.errors import InvalidRequest
from frontend.tokenizer.base import without_surrogates

# Between the texts of a content list, for templates that take one text only.
PART_SEPARATOR: Final = "\n"
TEXT_TYPES: Final = frozenset({"text", "input_text", "output_text"})
# Names that clients give the reasoning of an earlier answer; templates read the first, or "thinking".
REASONING: Final = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


def prepared(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages as plain new objects: no null fields, valid Unicode, "developer" as "system", arguments parsed.

    Raises:
        InvalidRequest: names the message and the field.
    """
    return [_prepared(plain(message), f"messages[{index}]") for index, message in enumerate(messages)]


def _prepared(message: Message, where: str) -> Message:
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") == "developer":
        message["role"] = "system"
    if isinstance(message.get("content"), list):
        message["content"] = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(message["content"])]
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    for index, call in enumerate(message.get("tool_calls", ())):
        _parse_arguments(call, f"{where}.tool_calls[{index}]")
    return message


def plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """A copy of a JSON value in which every text is valid Unicode."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, Mapping):
        return {without_surrogates(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _part(part: object, where: str) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or part.get("type") not in TEXT_TYPES or not isinstance(part.get("text"), str):
        given = part.get("type") if isinstance(part, dict) else part
        raise InvalidRequest(f'{where}: must be {{"type": "text", "text": ...}}, has type {given!r}', param="messages")
    return {**part, "type": "text"}


def _parse_arguments(call: object, where: str) -> None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}: must be an object with a function", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else None
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{where}.function.arguments: no valid JSON: {error}", param="messages") from error
    if arguments is not None and not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise InvalidRequest(f"{where}.function.arguments: must be a JSON object, is {kind}", param="messages")
    function["arguments"] = arguments or {}


def joined(parts: Sequence[Mapping[str, Any]]) -> str:
    """The texts of a content list as one text."""
    return PART_SEPARATOR.join(part["text"] for part in parts)
