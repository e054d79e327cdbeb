"""Every error of the tree has its place in HTTP."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from engine_core.wire.client import RejectCode
from frontend import errors
from frontend.api.errors import REJECTIONS, TABLE, describe, error_response


def below(kind: type[errors.FrontendError]) -> list[type[errors.FrontendError]]:
    """All classes under `kind` in the module of the tree."""
    found = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    return [*found, *(deeper for each in found for deeper in below(each))]


@pytest.mark.parametrize("kind", [*below(errors.RequestError), *below(errors.GenerationError), errors.EngineTimeout])
def test_no_error_of_a_request_is_without_a_status(kind: type[errors.FrontendError]) -> None:
    mapped = kind is errors.RequestRejected or any(issubclass(kind, each) for each, _, _ in TABLE)
    assert mapped, kind


def test_every_rejection_has_a_status() -> None:
    assert set(REJECTIONS) == set(get_args(RejectCode))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequest("n: at least 1, given 0", param="n"), 400, None),
        (errors.ContextTooLong(9, 8, "prompt"), 400, "context_length_exceeded"),
        (errors.ModelUnknown("a", "b"), 404, "model_not_found"),
        (errors.BodyTooLarge(10), 413, "body_too_large"),
        (errors.BodyEncoded("gzip"), 415, "unsupported_content_encoding"),
        (errors.NotReady("loading", "", 2.0), 503, "not_ready"),
        (errors.ServerStopping(), 503, "shutting_down"),
        (errors.EngineDead("gone"), 503, "internal"),
        (errors.GenerationFailed("broken"), 500, None),
        (errors.RequestRejected("queue_full", "full", retry_after_s=0.2), 429, "queue_full"),
        (errors.RequestRejected("context_length", "long", field="prompt"), 400, "context_length_exceeded"),
        (errors.TemplateRefused("roles must alternate"), 400, "chat_template_refused"),
    ],
)
def test_the_body_is_openais(error: errors.FrontendError, status: int, code: str | None) -> None:
    given, answer = describe(error)
    assert given == status
    body = msgspec.to_builtins(answer)["error"]
    assert body["code"] == code
    assert body["message"] == str(error)
    assert set(body) == {"message", "type", "param", "code"}


def test_headers_that_tell_more() -> None:
    assert error_response(errors.NotReady("loading", "", 1.2)).headers["retry-after"] == "2"
    assert error_response(errors.Unauthorized("no")).headers["www-authenticate"].startswith("Bearer")
    assert error_response(errors.BodyTooLarge(1)).headers["connection"] == "close"
    assert error_response(errors.BodyEncoded("br")).headers["accept-encoding"] == "identity"
