"""Messages of a chat request as chat templates want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from frontend.api.schema import Message
from frontend.errors import InvalidRequest

MAX_KWARGS: Final = 64


def template_kwargs(given: dict[str, Any] | None) -> dict[str, object]:
    """Extra variables for the template.

    Raises:
        InvalidRequest: there are too many.
    """
    kwargs: dict[str, object] = given or {}
    if len(kwargs) > MAX_KWARGS:
        raise InvalidRequest(
            f"chat_template_kwargs: at most {MAX_KWARGS} names, given {len(kwargs)}", param="chat_template_kwargs"
        )
    return kwargs


def template_messages(messages: Sequence[Message], *, continued: bool) -> list[dict[str, object]]:
    """The messages as plain data.

    Args:
        messages: of the request.
        continued: the last message is to be continued.

    Raises:
        InvalidRequest: a message has no content, or the last one is not the assistant's.
    """
    if continued and messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message: the last message must be the assistant's", param="continue_final_message"
        )
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: Message, index: int) -> dict[str, object]:
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise InvalidRequest(f"messages[{index}].content: is missing", param="messages")
    fields: dict[str, object] = msgspec.to_builtins(message)
    return fields
