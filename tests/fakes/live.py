"""The HTTP application over a fake engine core, in a thread of its own, on a real port."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import uvloop

from frontend.api.service import Service
from frontend.api.texts import Texts
from frontend.app import create_app
from frontend.client import AsyncClient
from frontend.config import HttpOptions
from frontend.health import Signs
from frontend.http_protocol import HttpLimits
from frontend.http_server import HttpServer, bind, make_server
from frontend.metrics import Metrics
from frontend.model_folder import ModelFolder
from frontend.tokenizer.load import load_tokenizer
from tests.fakes.core import FakeCore, fake_model
from tests.fixtures.chain import Chain, write_chain

T = TypeVar("T")

DEADLINE_S = 10.0
NAME = "chain"


class DirectEngine:
    """The engine of Service, over a client that is there from the start."""

    def __init__(self, client: AsyncClient) -> None:
        self.client: AsyncClient | None = client

    @property
    def signs(self) -> Signs:
        """The client's."""
        assert self.client is not None
        return self.client.signs


class LiveServer:
    """A running server; a context manager.

    Args:
        folder: an empty folder for model and sockets.
        chain: what the model says.
        options: of the endpoint.
        ready: whether the engine takes requests at once.
        max_backlog_bytes: of the client.
        limits: of HTTP connections.
        core_socket: of a core that runs already; None: the fake one.
    """

    def __init__(
        self,
        folder: Path,
        chain: Chain | None = None,
        options: HttpOptions | None = None,
        *,
        ready: bool = True,
        max_backlog_bytes: int = 4_194_304,
        limits: HttpLimits | None = None,
        core_socket: Path | None = None,
    ) -> None:
        self.chain = chain or Chain()
        self.model_dir = write_chain(folder / "model", self.chain)
        self._socket = folder / "core.sock" if core_socket is None else core_socket
        self._fake = core_socket is None
        self._options = options or HttpOptions()
        self._ready = ready
        self._max_backlog_bytes = max_backlog_bytes
        self._limits = limits
        self._up = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="live server")
        self.url = ""
        self.loop: asyncio.AbstractEventLoop
        self.core: FakeCore
        self.client: AsyncClient
        self.service: Service
        self.server: HttpServer

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._up.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False, verify=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` in the server's loop."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - handed on
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(DEADLINE_S)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        """POST a body, JSON or raw."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        return self.http.post(path, content=content, headers=given)

    def complete(self, prompt: Any = "a", **fields: Any) -> dict[str, Any]:
        """The answer of a completion that must succeed."""
        answer = self.post("/v1/completions", {"model": NAME, "prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return strict(answer.content)

    def chat(self, content: Any = "a", **fields: Any) -> dict[str, Any]:
        """The answer of a chat request that must succeed."""
        messages = [{"role": "user", "content": content}]
        answer = self.post("/v1/chat/completions", {"model": NAME, "messages": messages, **fields})
        assert answer.status_code == 200, answer.text
        return strict(answer.content)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream that must succeed and end with [DONE]."""
        answer = self.post(path, {"model": NAME, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parse_events(answer.content)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; 0 where it is missing."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.http.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            sample, _, given = head.partition("{")
            if sample == name and wanted <= set(given.rstrip("}").split(",")):
                return float(value)
        return 0.0

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            self._error = error
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        model = fake_model(str(self.model_dir), eos=self.chain.eos_token_ids, max_model_len=self.chain.max_position)
        self.core = FakeCore(self._socket, model, self.chain.successors())
        if self._fake:
            await self.core.start(ready=self._ready)
        tokenizer = load_tokenizer(self.model_dir)
        texts = Texts.of(ModelFolder.open(self.model_dir), tokenizer)
        self.client = await AsyncClient.connect(
            self._socket, name="http", tokenizer=tokenizer, max_backlog_bytes=self._max_backlog_bytes
        )
        if self._ready:
            await self.client.wait_ready(DEADLINE_S)
        metrics = Metrics(NAME, lambda: self.client.status)
        self.service = Service(self._options, (NAME, "alias"), DirectEngine(self.client), metrics)
        self.server = server = make_server(
            create_app(self.service, texts, "1.2.3"), self._limits, metrics.connection_cut
        )
        with bind("127.0.0.1", 0) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            self._up.set()
            await self._end.wait()
            server.should_exit = True
            await serving
        await self.client.close()
        if self._fake:
            await self.core.stop()
        texts.close()


def strict(content: bytes) -> dict[str, Any]:
    """JSON as a strict parser reads it: no NaN, no infinity, valid UTF-8."""
    return msgspec.json.decode(content, type=dict[str, Any])


def parse_events(content: bytes) -> list[dict[str, Any]]:
    """The JSON of each event; the last event must be [DONE]."""
    blocks = [block for block in content.decode().split("\n\n") if block and not block.startswith(":")]
    assert all(len(block.splitlines()) == 1 and block.startswith("data: ") for block in blocks), blocks
    texts = [block.removeprefix("data: ") for block in blocks]
    assert texts[-1] == "[DONE]", texts[-3:]
    return [strict(text.encode()) for text in texts[:-1]]


def eventually(holds: Callable[[], bool], what: str, seconds: float = DEADLINE_S) -> None:
    """Poll until `holds`, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
