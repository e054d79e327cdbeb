"""A conversation with a running server over HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from frontend.errors import TalkError, UsageError

# A server may think about the first token for long, but it sends comments while it does.
SILENCE_S: Final = 120.0
DATA: Final = b"data: "
DONE: Final = b"[DONE]"


class HttpTalk:
    """Asks a server's chat endpoint.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        api_key: sent as a bearer token; None: none.
        options: further fields of every request.
        silence_s: seconds without a byte after which the server counts as gone.

    Raises:
        UsageError: the address is no http address.
    """

    def __init__(
        self, url: str, *, api_key: str | None, options: Mapping[str, Any], silence_s: float = SILENCE_S
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url: {url!r} must be an address such as http://127.0.0.1:8000")
        try:
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--url: {url!r}: {error}") from error
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = url
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._connection = kind(parts.hostname, port, timeout=silence_s)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._options = dict(options)
        self._model: str | None = None

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The answer, piece by piece; closing the iterator cancels it.

        Raises:
            TalkError: the server answered with an error, or not at all.
        """
        body = {"model": self._model_name(), "messages": list(messages), "stream": True, **self._options}
        response = self._ask("POST", "/v1/chat/completions", json.dumps(body))
        try:
            for data in _events(response):
                if data == DONE:
                    return
                yield from _text(data)
        except (OSError, http.client.HTTPException) as error:
            raise TalkError(f"{self._url}: {error}") from error
        finally:
            # A connection that was read to its end would do for the next request, one that was not, not.
            self._connection.close()
        raise TalkError(f"{self._url}: the answer was cut off")

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def _model_name(self) -> str:
        if self._model is None:
            listed = _parsed(self._ask("GET", "/v1/models", None).read())
            try:
                self._model = str(listed["data"][0]["id"])
            except (LookupError, TypeError) as error:
                raise TalkError(f"{self._url}: lists no model") from error
        return self._model

    def _ask(self, method: str, path: str, body: str | None) -> http.client.HTTPResponse:
        try:
            self._connection.request(method, self._base + path, body, self._headers)
            response = self._connection.getresponse()
            if response.status == http.client.OK:
                return response
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise TalkError(f"{self._url}: {error}") from error
        self._connection.close()
        raise TalkError(f"{response.status}: {_message(text)}")


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while line := response.readline():
        if line.startswith(DATA):
            yield line.removeprefix(DATA).strip()


def _text(data: bytes) -> Iterator[str]:
    event = _parsed(data)
    if "error" in event:
        raise TalkError(_message(data))
    for choice in event.get("choices") or ():
        content = (choice.get("delta") or {}).get("content")
        if content:
            yield content


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise TalkError(f"the server sent no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TalkError("the server sent no JSON object")
    return value


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return data[:200].decode(errors="replace")
