"""Requests of every kind at once, each in a thread, and whether each got exactly what an undisturbed run gives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from engine_core.wire.sampling import SamplingParams
from frontend.client import Client
from frontend.errors import FrontendError
from tests.fakes.executor import continuation
from tests.fault.rig import Rig

ANSWER_S: Final = 60.0
# Sequences that start_mixed and start_prefill make.
MIXED: Final = 9
PREFILLS: Final = 5

Expected = Callable[[Sequence[int], int], list[int]]


@dataclass
class Got:
    """What came for one answer; `latest` is the moment of its latest part, `pause` the longest time between two."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    logprobs: int = 0
    latest: float | None = None
    pause: float = 0.0

    def add(self, ids: Sequence[int]) -> None:
        """Tokens have come now."""
        self.ids += ids
        now = time.monotonic()
        self.pause = max(self.pause, now - (self.latest or now))
        self.latest = now


@dataclass(eq=False)
class Request:
    """One request and all that came of it.

    Attributes:
        kind: "stream", "whole" or "python".
        prompt, count, n: what was asked for.
        answers: by index.
        usage: completion tokens, as the server counted them; None: it did not.
        error: why it failed, empty if it did not.
    """

    kind: str
    prompt: list[int]
    count: int
    n: int = 1
    logprobs: int | None = None
    answers: dict[int, Got] = field(default_factory=dict)
    usage: int | None = None
    error: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def body(self) -> dict[str, Any]:
        """As a completion request."""
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.count,
            "n": self.n,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
            "logprobs": self.logprobs,
        }
        if self.kind == "stream":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def faults(self, expected: Expected) -> list[str]:
        """What is not as it must be; a request that was cut must have been told so."""
        name = f"{self.kind} of {len(self.prompt)}+{self.count}x{self.n}"
        if not self.ended.is_set():
            return [f"{name}: no end"]
        if self.error:
            return [f"{name}: {self.error}"]
        wanted = expected(self.prompt, self.count)
        found = [f"{name}: answers {sorted(self.answers)}"] if sorted(self.answers) != list(range(self.n)) else []
        for index, got in self.answers.items():
            if got.ids != wanted:
                place = next((i for i, (a, b) in enumerate(zip(got.ids, wanted, strict=False)) if a != b), -1)
                found.append(f"{name}[{index}]: {len(got.ids)} tokens, expected {len(wanted)}; first wrong: {place}")
            if got.finish != "length":
                found.append(f"{name}[{index}]: finish {got.finish}")
            if self.logprobs is not None and got.logprobs != self.count:
                found.append(f"{name}[{index}]: {got.logprobs} logprobs")
        if self.usage not in (None, self.count * self.n):
            found.append(f"{name}: usage {self.usage}")
        return found


class Traffic:
    """Requests under way.

    Args:
        rig: the server.
        client: for the Python requests.
        expected: gives the tokens that must come for a prompt.

    Attributes:
        requests: those not yet taken.
        longest_pause: seconds between two parts of an answer, over all that were looked at.
    """

    def __init__(self, rig: Rig, client: Client, expected: Expected = continuation) -> None:
        self.requests: list[Request] = []
        self.longest_pause = 0.0
        self._url = rig.url
        self._client = client
        self._expected = expected
        self._threads: list[threading.Thread] = []

    def start(self, request: Request) -> Request:
        """Send a request."""
        work = self._python if request.kind == "python" else self._http
        thread = threading.Thread(target=_guarded, args=(work, request))
        self.requests.append(request)
        self._threads.append(thread)
        thread.start()
        return request

    def wait(self, seconds: float = ANSWER_S) -> list[str]:
        """Wait for all ends; what is not as it must be."""
        for request in self.requests:
            request.ended.wait(seconds)
        for thread in self._threads:
            thread.join(1.0)
        return self._judge(self.requests)

    def take_ended(self) -> list[str]:
        """Forget the requests that have ended; what was not as it must be."""
        ended = [request for request in self.requests if request.ended.is_set()]
        self.requests = [request for request in self.requests if request not in ended]
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return self._judge(ended)

    def _judge(self, ended: Sequence[Request]) -> list[str]:
        pauses = [got.pause for request in ended for got in request.answers.values()]
        self.longest_pause = max([self.longest_pause, *pauses])
        return [fault for request in ended for fault in request.faults(self._expected)]

    def under_way(self) -> int:
        """Requests without an end."""
        return sum(not request.ended.is_set() for request in self.requests)

    def _http(self, request: Request) -> None:
        # To verify, each client would first read all certificates: 30 ms, in which the moment to meet may pass.
        with httpx.Client(base_url=self._url, trust_env=False, verify=False, timeout=ANSWER_S) as http:
            if request.kind == "stream":
                with http.stream("POST", "/v1/completions", json=request.body()) as answer:
                    self._read_stream(request, answer)
                return
            answer = http.post("/v1/completions", json=request.body())
            if answer.status_code != 200:
                request.error = f"status {answer.status_code}: {answer.text}"
                return
            _take(request, answer.json())

    def _read_stream(self, request: Request, answer: httpx.Response) -> None:
        if answer.status_code != 200:
            request.error = f"status {answer.status_code}"
            return
        done = False
        for line in answer.iter_lines():
            assert not done or not line, line
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                _take(request, json.loads(line.removeprefix("data: ")))
        if not done and not request.error:
            request.error = "the stream ended without [DONE]"

    def _python(self, request: Request) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=request.count, ignore_eos=True, logprobs=request.logprobs)
        got = request.answers.setdefault(0, Got())
        try:
            for output in self._client.submit(request.prompt, params):
                got.add(output.token_ids)
                got.logprobs += len(output.logprobs or ())
                got.finish = output.finish
        except FrontendError as error:
            request.error = f"{type(error).__name__}: {error}"


def _guarded(work: Callable[[Request], None], request: Request) -> None:
    try:
        work(request)
    except (httpx.HTTPError, AssertionError, ValueError) as error:
        request.error = f"{type(error).__name__}: {error}"
    finally:
        request.ended.set()


def _take(request: Request, part: dict[str, Any]) -> None:
    """A whole answer, or a chunk of one."""
    if "error" in part:
        request.error = part["error"]["message"]
        return
    if part.get("usage"):
        request.usage = part["usage"]["completion_tokens"]
    for choice in part["choices"]:
        got = request.answers.setdefault(choice["index"], Got())
        got.add(choice.get("token_ids") or [])
        got.text += choice["text"]
        got.logprobs += len((choice.get("logprobs") or {}).get("tokens", []))
        got.finish = choice["finish_reason"] or got.finish


def start_mixed(traffic: Traffic, count: int) -> None:
    """Streams, non-streams, n = 2, Python clients; more sequences than rows, so that some wait."""
    for kind, n, prompt, logprobs in (
        ("stream", 1, [1, 2, 3], None),
        ("stream", 2, [4, 5, 6, 7], None),
        ("whole", 1, [8, 9], 2),
        ("python", 1, [10, 11, 12], 3),
        ("stream", 1, [13] * 10, 1),
        ("whole", 2, [14, 15], None),
        ("python", 1, [16], None),
    ):
        traffic.start(Request(kind, prompt, count, n, logprobs))


def start_prefill(traffic: Traffic) -> None:
    """Prompts that take many steps."""
    for number, (kind, n) in enumerate((("stream", 1), ("whole", 1), ("python", 1), ("stream", 2))):
        traffic.start(Request(kind, [number * 7 + i % 100 for i in range(900)], 10, n))
