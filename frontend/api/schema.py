"""Request bodies of the OpenAI endpoints, decoded from raw bytes.

null means absent, everywhere. Unknown fields are not errors here: `fields` gives the names that a body brought.
Ranges that need no knowledge of the model stand in the types; the rest is api/validate.py's.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from engine_core.wire.sampling import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, TokenId
from frontend.errors import InvalidRequest, shown

T = TypeVar("T")

MAX_N: Final = 128
MAX_STOP_STRINGS: Final = 64
MAX_SHOWN: Final = 80

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Limit = Annotated[int, Meta(ge=1, le=2**63 - 1)]
StopStrings = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOP_STRINGS)]


class StreamOptions(Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(Struct, frozen=True, kw_only=True):
    """What both endpoints take. Meanings and ranges are SamplingParams' where the names are equal."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str, Meta(min_length=1)] | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """Body of POST /v1/completions. `prompt` is read by `prompts`."""

    prompt: Raw = Raw()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class Function(Struct, frozen=True):
    """The function of a tool call in the history."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, frozen=True):
    """A tool call in the history."""

    function: Function
    id: str | None = None
    type: str | None = None


class Part(Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(Struct, frozen=True):
    """One message of a conversation; fields that no template reads are dropped."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def fields(body: bytes) -> dict[str, Raw]:
    """The fields of a JSON object, undecoded.

    Raises:
        InvalidRequest: the body is no JSON object.
    """
    return _decode(body, dict[str, Raw], "body")


def parse(body: bytes, kind: type[T]) -> T:
    """The body as `kind`.

    Raises:
        InvalidRequest: a field has a wrong type or is out of range; `param` names it.
    """
    try:
        return _decode(body, kind, None)
    except InvalidRequest as error:
        given = fields(body).get(error.param or "")
        if given is None:
            raise
        text = shown(bytes(given)[:MAX_SHOWN].decode(errors="replace"), MAX_SHOWN)
        raise InvalidRequest(f"{error.message}; given {text}", param=error.param) from error


def value(raw: Raw) -> object:
    """One undecoded field as plain Python data."""
    return _decode(bytes(raw), object, None)


def prompts(raw: Raw) -> list[str] | list[list[int]]:
    """The prompt of a completion in its four forms: text, texts, ids, lists of ids.

    Raises:
        InvalidRequest: it is none of them.
    """
    text = bytes(raw).lstrip()
    if text in (b"", b"null"):
        raise InvalidRequest("prompt: is missing", param="prompt")
    if text[:1] == b'"':
        return [_decode(text, str, "prompt")]
    inner = text[1:].lstrip()[:1] if text[:1] == b"[" else b""
    if inner == b"]":
        raise InvalidRequest("prompt: an empty list is no prompt", param="prompt")
    if inner == b'"':
        return _decode(text, list[str], "prompt")
    if inner == b"[":
        return _decode(text, list[list[TokenId]], "prompt")
    if inner:
        return [_decode(text, list[TokenId], "prompt")]
    raise InvalidRequest("prompt: expected text, token ids, a list of texts or a list of lists of ids", param="prompt")


def _decode(body: bytes, kind: type[T], param: str | None) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError as error:
        raise InvalidRequest("the JSON is nested too deeply", param=param) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _invalid(str(error), param) from error


def _invalid(message: str, param: str | None) -> InvalidRequest:
    # The library ends its messages with the place: "... - at `$.messages[0].role`".
    found = re.search(r" - at `\$\.?(.*?)`$", message)
    place = found[1] if found else ""
    if param is not None:
        place = f"{param}{place}" if param != "body" else param
    if found:
        message = message[: found.start()]
    missing = re.match(r"Object missing required field `(.*)`$", message)
    if missing and not place:
        return InvalidRequest(f"{missing[1]}: is missing", param=missing[1])
    top = re.split(r"[.\[]", place, maxsplit=1)[0] or None
    return InvalidRequest(f"{place}: {message}" if place else message, param=top)
