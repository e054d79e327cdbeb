"""The error tree of frontend.

FrontendError
├── StartError              the server does not start, or ends; carries the exit code
│   ├── UsageError          a flag, a value or a configuration file (2)
│   ├── PortUnavailable     the address cannot be bound (2)
│   ├── StartRefused        the model or the configuration cannot be honoured (3)
│   │   ├── ModelFolderError    a file of the model folder is missing, cut or wrong
│   │   └── TokenizerError      the tokenizer's files cannot be honoured
│   └── EngineFailed        the engine ended while the server ran (4)
├── RequestError            a request is answered with an error; api/errors.py maps each class to HTTP
│   ├── InvalidRequest      a field or its value
│   ├── ContextTooLong      the prompt leaves no room
│   ├── ModelUnknown        another model than the served one
│   ├── RouteUnknown        no such path
│   ├── MethodUnknown       no such method on the path
│   ├── Unauthorized        no valid API key
│   ├── BodyTooLarge        more bytes than --max-body-bytes
│   ├── BodyEncoded         a body with a content-encoding
│   ├── NotReady            the engine loads, recovers or drains
│   ├── ServerStopping      the server ends before the answer did
│   ├── RequestRejected     the engine core did not take the submission
│   ├── TextOverload        too many texts wait to be tokenized
│   └── TemplateError       the chat template gave no prompt
│       ├── TemplateMissing     the model has none
│       ├── TemplateRefused     the template itself refused the messages
│       ├── TemplateBroken      the template has a fault
│       └── TemplateTooLarge    rendering passed its limit of time, steps or size
├── GenerationError         an answer ends before its end
│   ├── EngineDead          the engine is gone; nothing more will come
│   ├── GenerationFailed    the engine gave this request up
│   ├── BacklogExceeded     nobody read the answer; it was cut
│   └── ClientGone          the HTTP client went away, or does not read
├── EngineTimeout           the engine did not answer in time
└── TalkError               a server answered `tercet chat` with an error, or not at all
"""

from __future__ import annotations

from typing import Final

from engine_core.wire.client import RejectCode

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_REFUSED: Final = 3
EXIT_ENGINE: Final = 4


class FrontendError(Exception):
    """Root of every error that the frontend raises on purpose."""


class StartError(FrontendError):
    """The server does not start, or ends.

    Attributes:
        exit_code: of the process.
    """

    exit_code = 1


class UsageError(StartError):
    """A flag, a value or a configuration file is wrong; the message names it and what is allowed."""

    exit_code = EXIT_USAGE


class PortUnavailable(StartError):
    """The address cannot be bound.

    Args:
        host, port: the address.
        reason: of the operating system.
    """

    exit_code = EXIT_USAGE

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}")
        self.host = host
        self.port = port


class StartRefused(StartError):
    """The model or the configuration cannot be honoured; the message names the culprit."""

    exit_code = EXIT_REFUSED


class EngineFailed(StartError):
    """The engine ended while the server ran."""

    exit_code = EXIT_ENGINE


class RequestError(FrontendError):
    """A request is answered with an error.

    Attributes:
        message: one line for the caller.
        param: the field at fault.
        code: machine-readable reason, where one exists.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """A field, its type or its value; the message names field, limit and value."""


class ContextTooLong(RequestError):
    """The prompt leaves no room for a token.

    Args:
        given: tokens of the prompt.
        limit: of prompt and output together.
        param: the field that holds the prompt.
        at_least: there are so many for sure, by the length of the text alone.
    """

    def __init__(self, given: int, limit: int, param: str, *, at_least: bool = False) -> None:
        size = f"at least {given}" if at_least else f"{given}"
        super().__init__(
            f"{param}: the prompt is {size} tokens long; this model's maximum context length is {limit} tokens, "
            "prompt and output together, and at least one must be left for the output",
            param=param,
            code="context_length_exceeded",
        )
        self.given = given
        self.limit = limit


class ModelUnknown(RequestError):
    """Another model than the served one."""

    def __init__(self, given: str, served: str) -> None:
        super().__init__(
            f"model: {shown(given)} is not served here; this server has {served}", param="model", code="model_not_found"
        )


class RouteUnknown(RequestError):
    """No such path."""


class MethodUnknown(RequestError):
    """No such method on the path."""


class Unauthorized(RequestError):
    """No valid API key."""


class BodyTooLarge(RequestError):
    """More bytes than --max-body-bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes (--max-body-bytes)", code="body_too_large")
        self.limit = limit


class BodyEncoded(RequestError):
    """A body with a content-encoding.

    Args:
        given: the header.
    """

    def __init__(self, given: str) -> None:
        super().__init__(
            f"content-encoding: {shown(given)} is not taken, only identity: the body as it is",
            code="unsupported_content_encoding",
        )
        self.given = given


class NotReady(RequestError):
    """The engine takes nothing now.

    Args:
        state: of the engine.
        reason: more of it, one line.
        retry_after_s: when to come back, in seconds.
    """

    def __init__(self, state: str, reason: str, retry_after_s: float) -> None:
        super().__init__(f"the engine is {state}" + (f": {reason}" if reason else ""), code="not_ready")
        self.state = state
        self.retry_after_s = retry_after_s


class ServerStopping(RequestError):
    """The server ends before the answer did."""

    def __init__(self, message: str = "the server is shutting down") -> None:
        super().__init__(message, code="shutting_down")


class RequestRejected(RequestError):
    """The engine core did not take the submission.

    Args:
        code: the core's reason.
        message: one line naming field, limit and value.
        field: the field at fault.
        limit, given: the numbers.
        retry_after_s: when to come back, in seconds.
    """

    def __init__(
        self,
        code: RejectCode,
        message: str,
        field: str | None = None,
        limit: int | None = None,
        given: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=field, code=code)
        self.reject_code = code
        self.field = field
        self.limit = limit
        self.given = given
        self.retry_after_s = retry_after_s


class GenerationError(FrontendError):
    """An answer ends before its end."""


class EngineDead(GenerationError):
    """The engine is gone; nothing more will come.

    Args:
        message: one line.
        code: why, as the core's Fatal names it.
    """

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class GenerationFailed(GenerationError):
    """The engine gave this request up; the message says why."""


class ClientGone(GenerationError):
    """The HTTP client went away, or does not read."""


class BacklogExceeded(GenerationError):
    """Nobody read the answer, so it was aborted.

    Args:
        given: bytes that waited.
        limit: the most that may wait.
    """

    def __init__(self, given: int, limit: int) -> None:
        super().__init__(f"the answer was aborted: {given} bytes of it waited to be read, at most {limit}")
        self.given = given
        self.limit = limit


class EngineTimeout(FrontendError):
    """The engine did not answer in time.

    Args:
        what: the thing awaited.
        seconds: how long.
    """

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what}: nothing came within {seconds:g} s")
        self.what = what
        self.seconds = seconds


class TalkError(FrontendError):
    """A server answered `tercet chat` with an error, or not at all; the message says what."""


class ModelFolderError(StartRefused):
    """A file of the model folder is missing, cut or wrong.

    Args:
        path: the file or folder.
        fault: what is wrong with it.
    """

    def __init__(self, path: object, fault: str) -> None:
        super().__init__(f"{path}: {fault}")
        self.path = str(path)
        self.fault = fault


class TokenizerError(StartRefused):
    """The tokenizer's files cannot be honoured.

    Args:
        path: the file.
        fault: what is wrong with it.
    """

    def __init__(self, path: object, fault: str) -> None:
        super().__init__(f"{path}: {fault}")
        self.path = str(path)
        self.fault = fault


class TextOverload(RequestError):
    """Too many texts wait to be tokenized.

    Args:
        given: jobs that wait or run.
        limit: the most there may be.
    """

    def __init__(self, given: int, limit: int) -> None:
        super().__init__(f"{given} texts wait to be tokenized, at most {limit}", code="overloaded")
        self.given = given
        self.limit = limit
        self.retry_after_s = 1.0


class TemplateError(RequestError):
    """The chat template gave no prompt; the message says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages", code=self.reason)

    reason = "chat_template"


class TemplateMissing(TemplateError):
    """The model has no chat template."""

    reason = "chat_template_missing"


class TemplateRefused(TemplateError):
    """The template itself refused the messages; the message is the template's own text."""

    reason = "chat_template_refused"


class TemplateBroken(TemplateError):
    """The template has a fault: it does not parse, or fails on these messages."""

    reason = "chat_template_broken"


class TemplateTooLarge(TemplateError):
    """Rendering passed its limit of time, steps or size; the message names it."""

    reason = "chat_template_limit"


def shown(value: str, limit: int = 80) -> str:
    """A value from outside as it may stand in a message: quoted, one line, at most `limit` characters."""
    text = value if len(value) <= limit else value[: limit - 3] + "..."
    return ascii(text)
