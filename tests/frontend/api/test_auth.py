"""API keys guard every path but the health checks, however the path is spelled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from frontend.config import HttpOptions
from tests.fakes.live import LiveServer, strict

KEYS = ("sk-one", "sk-two")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with two keys."""
    with LiveServer(tmp_path_factory.mktemp("guarded"), options=HttpOptions(api_key=KEYS)) as server:
        yield server


PATHS = [
    *("/", "/docs", "/metrics", "/version", "/tokenize", "/v1/models", "/v1/models/chain", "/debug/invariants"),
    *("/v1/completions", "/v1/chat/completions", "//v1/models", "/v1/../v1/models", "/%76%31/models", "/V1/MODELS"),
    *("/reports/load", "/reports/startup", "/reports/kernels", "/live%00", "/live;x", "/live/x", "/%6cive/../metrics"),
    *("/v1/models/", "/health/", "//health", "/live/../metrics", "/health/../metrics", "/HEALTH", "/ready%2f"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "DELETE"])
def test_no_key_no_answer(guarded: LiveServer, path: str, method: str) -> None:
    answer = guarded.http.request(method, path, headers={"x-http-method-override": "GET"})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    if method != "HEAD":
        error = strict(answer.content)["error"]
        assert error["code"] == "invalid_api_key"
        assert "sk-" not in answer.text


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer  sk-one", "bearer sk-one", "Basic sk-one", "sk-one", "Bearer sk-on", "Bearer sk-one x"],
)
def test_wrong_keys(guarded: LiveServer, value: str) -> None:
    assert guarded.http.get("/v1/models", headers={"authorization": value}).status_code == 401


def test_two_headers_are_none(guarded: LiveServer) -> None:
    headers = [("authorization", "Bearer sk-one"), ("authorization", "Bearer sk-one")]
    assert guarded.http.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(guarded: LiveServer, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    for path in ("/v1/models", "/metrics", "/version"):
        assert guarded.http.get(path, headers=headers).status_code == 200
    assert guarded.http.get("/nothing", headers=headers).status_code == 404


@pytest.mark.parametrize("path", ["/live", "/ready", "/health"])
def test_health_is_open(guarded: LiveServer, path: str) -> None:
    assert guarded.http.get(path).status_code == 200
