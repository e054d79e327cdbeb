"""The life of `tercet serve`: the port first, then the model folder, the engine, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import uvloop
from setproctitle import setproctitle

from engine_core.wire.client import Ready
from engine_core.wire.config import TextFacts
from engine_core.wire.transport import CORE_SOCKET
from frontend.api.reports import write_reports
from frontend.api.service import Service
from frontend.api.texts import Texts
from frontend.app import create_app
from frontend.config import API_KEY_VARIABLE, MASK, ServeConfig, served_names
from frontend.engine_process import CORE_MODULE, EngineProcess
from frontend.errors import EngineDead, EngineFailed, ServerStopping, StartError, UsageError
from frontend.http_server import bind, make_server, raise_descriptor_limit
from frontend.metrics import Metrics
from frontend.model_folder import ModelFolder
from frontend.progress import StartProgress
from frontend.runtime_dir import RuntimeDir, base_dir
from frontend.tokenizer.load import load_tokenizer

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# How long answers that were cut get to say so.
FAREWELL_S: Final = 2.0
HTTP_END_S: Final = 5.0
PROBE_S: Final = 0.5


@dataclass(frozen=True)
class Prepared:
    """What stands before the event loop starts.

    Attributes:
        config: with what the tokenizer says in it.
        listener: the bound port; url: its address.
        texts: tokenizer and template.
    """

    config: ServeConfig
    listener: socket.socket
    url: str
    texts: Texts


def serve(
    config: ServeConfig,
    say: Callable[[str], None],
    *,
    version: str = "0",
    module: Sequence[str] = CORE_MODULE,
) -> int:
    """Serve until a signal; gives the exit code.

    Args:
        config: complete.
        say: prints a line for the operator.
        version: of the package.
        module: how Python starts the engine core.

    Raises:
        StartError: the server did not start, or the engine failed; with the exit code.
    """
    setproctitle(process_title(sys.argv))
    # The processes below need no key.
    os.environ.pop(API_KEY_VARIABLE, None)
    raise_descriptor_limit()
    prepared = prepare(config, say)
    with contextlib.closing(prepared.listener):
        runtime = RuntimeDir.create(base_dir(os.environ))
        path = Path(config.client.client_socket) if config.client.client_socket else runtime.path / CORE_SOCKET
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(Server(prepared, runtime.path, path, say, version, module).run())
        finally:
            path.unlink(missing_ok=True)
            runtime.remove()


def prepare(config: ServeConfig, say: Callable[[str], None]) -> Prepared:
    """Bind the port and read the model folder: all that can be refused at once.

    Raises:
        StartError: it is refused.
    """
    listener = bind(config.http.host, config.http.port)
    try:
        url = _url(listener)
        say(f"listening on {url}")
        check_client_socket(config.client.client_socket)
        check_report_dir(config.reports.report_dir)
        check_trace_file(config.reports.trace_file)
        weights = config.engine.model.load_format != "dummy"
        template = Path(config.http.chat_template) if config.http.chat_template else None
        folder = ModelFolder.open(Path(config.engine.model.model), chat_template=template, weights=weights)
        tokenizer = load_tokenizer(folder.path)
        facts = TextFacts(eos_token_ids=folder.end_ids(tokenizer.eos_id), vocab_size=tokenizer.vocab_size)
        texts = Texts.of(folder, tokenizer)
        engine = msgspec.structs.replace(config.engine, text=facts)
        return Prepared(msgspec.structs.replace(config, engine=engine), listener, url, texts)
    except StartError:
        listener.close()
        raise


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_client_socket(path: str | None) -> None:
    """Pass a socket path that no other server listens on.

    Raises:
        UsageError: one does, or the path cannot be a socket; a file there would be overwritten.
    """
    if path is None:
        return
    if Path(path).exists() and not Path(path).is_socket():
        raise UsageError(f"--client-socket: {path}: is there, and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if Path(path).parent.is_dir():
                return
            raise UsageError(f"--client-socket: {path}: the directory does not exist") from None
        except OSError as error:
            raise UsageError(f"--client-socket: {path}: {error.strerror or error}") from error
    raise UsageError(f"--client-socket: {path}: another server listens there")


def check_report_dir(path: str | None) -> None:
    """Make the folder for reports.

    Raises:
        UsageError: it cannot be made, or not written.
    """
    if path is None:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--report-dir: {path}: {error.strerror or error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--report-dir: {path}: the folder cannot be written")


def check_trace_file(path: str | None) -> None:
    """Make the file for the timeline, empty as yet.

    Raises:
        UsageError: it cannot be written.
    """
    if path is None:
        return
    try:
        Path(path).open("wb").close()
    except OSError as error:
        raise UsageError(f"--trace-file: {path}: {error.strerror or error}") from error


def process_title(argv: Sequence[str]) -> str:
    """The command line as `ps` shows it, API keys masked."""
    words: list[str] = []
    for word in argv[1:]:
        flag, _, value = word.partition("=")
        if words and words[-1] == "--api-key":
            words.append(MASK)
        elif flag == "--api-key" and value:
            words.append(f"{flag}={MASK}")
        else:
            words.append(word)
    return " ".join(["tercet", *words])


class Server:
    """The running server.

    Args:
        prepared: what stands already.
        runtime_dir: private directory.
        client_socket: where the engine core listens to clients.
        say: prints a line for the operator.
        version: of the package.
        module: how Python starts the engine core.
    """

    def __init__(
        self,
        prepared: Prepared,
        runtime_dir: Path,
        client_socket: Path,
        say: Callable[[str], None],
        version: str,
        module: Sequence[str],
    ) -> None:
        self._prepared = prepared
        self._client_socket = client_socket
        self._say = say
        self._started = time.monotonic()
        config = prepared.config
        self._progress = StartProgress(say, bar=sys.stderr.isatty())
        self._engine = EngineProcess(
            config.engine,
            runtime_dir,
            client_socket,
            prepared.texts.tokenizer,
            max_backlog_bytes=config.http.max_stream_backlog_bytes,
            on_progress=self._progress,
            on_ready=self._on_ready,
            trace_file=Path(config.reports.trace_file) if config.reports.trace_file else None,
            module=module,
        )
        names = served_names(config)
        metrics = Metrics(
            names[0],
            lambda: None if self._engine.client is None else self._engine.client.status,
            recoveries=lambda: None if self._engine.client is None else self._engine.client.recoveries,
        )
        self._service = Service(config.http, names, self._engine, metrics)
        self._http = make_server(create_app(self._service, prepared.texts, version), on_cut=metrics.connection_cut)
        self._signals = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal; gives the exit code.

        Raises:
            StartError: the engine did not start, or failed.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(self._http.serve(sockets=[self._prepared.listener]))
        engine = asyncio.create_task(self._engine.run())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({http, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await self._drain(engine)
                return 0
            if engine.done():
                raise await self._fail(engine.result())
            raise EngineFailed(f"the HTTP server ended: {http.exception() or 'without a reason'}")
        finally:
            await self._end(http, engine, stop)

    def _on_signal(self) -> None:
        self._signals += 1
        (self._stop if self._signals == 1 else self._hurry).set()

    def _on_ready(self, ready: Ready) -> None:
        self._progress.close()
        report_dir = self._prepared.config.reports.report_dir
        if report_dir is not None:
            write_reports(Path(report_dir), ready)
        name = self._service.names[0]
        seconds = time.monotonic() - self._started
        self._say(
            f"ready in {seconds:.1f} s: {self._prepared.url} serves {name} ({ready.model.dtype}, "
            f"{ready.model.max_model_len} tokens of context)"
        )
        self._say(f"Python clients: {self._client_socket}")
        self._say(f"try: {try_line(self._prepared.url, name, chat=self._prepared.texts.has_template)}")

    async def _drain(self, engine: asyncio.Task[StartError]) -> None:
        self._service.draining = True
        self._engine.drain()
        running = self._service.running
        limit = self._prepared.config.http.shutdown_timeout
        if len(running):
            self._say(f"stopping: {len(running)} answers have {limit:g} s to finish; another signal ends them now")
        idle = asyncio.create_task(self._idle(limit))
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait({idle, hurry, engine}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (idle, hurry):
                task.cancel()
            await asyncio.gather(idle, hurry, return_exceptions=True)
        cut = running.cut(ServerStopping())
        if cut:
            self._say(f"stopping: {cut} answers were cut")
            await running.wait_idle(FAREWELL_S)

    async def _idle(self, limit: float) -> None:
        """Return when no answer is being made, over HTTP or for a Python client, or `limit` seconds have passed."""
        deadline = time.monotonic() + limit
        if await self._service.running.wait_idle(limit):
            await self._engine.wait_idle(deadline - time.monotonic())

    async def _fail(self, failure: StartError) -> StartError:
        # Open answers heard of it from their own connection to the core; this is for those that did not.
        running = self._service.running
        if not await running.wait_idle(FAREWELL_S):
            running.cut(EngineDead(str(failure)))
            await running.wait_idle(FAREWELL_S)
        return failure

    async def _end(self, *tasks: asyncio.Task[object]) -> None:
        http, *others = tasks
        self._progress.close()
        self._http.should_exit = True
        await asyncio.wait({http}, timeout=HTTP_END_S)
        for task in (http, *others):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.stop()
        self._prepared.texts.close()


def try_line(url: str, model: str, *, chat: bool) -> str:
    """A command that shows that the server works."""
    path, field = ("chat/completions", '"messages": [{"role": "user", "content": "Hello"}]')
    if not chat:
        path, field = "completions", '"prompt": "Once upon a time"'
    body = f'{{"model": {msgspec.json.encode(model).decode()}, {field}, "stream": true}}'
    return f"curl -N {url}/v1/{path} -H 'content-type: application/json' -d '{body}'"
