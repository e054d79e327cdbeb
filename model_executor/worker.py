"""The executor's only socket: hello, start with progress, then a result for each plan, in order.

Nothing here imports torch before the model's configuration has been read, so that a model that cannot be served is
refused at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import zmq

from engine_core.wire import codec, transport
from engine_core.wire.client import PROTOCOL, Progress
from engine_core.wire.config import EngineConfig, config_hash
from engine_core.wire.errors import Backpressure
from engine_core.wire.executor import (
    CoreToExecutor,
    ExecutorFatal,
    ExecutorHello,
    ExecutorToCore,
    Shutdown,
)
from engine_core.wire.reports import Phase
from model_executor.collector import StepRunner, collector_of
from model_executor.errors import ModelRefused, PlanInvalid
from model_executor.models.reader import read_spec

if TYPE_CHECKING:
    from model_executor.startup import Executor

log = logging.getLogger(__name__)

EXIT_CLEAN = 0
EXIT_REFUSED = 3
EXIT_FAILED = 4
# A wait for the next plan ends this often to let signals and the interpreter's other threads in.
POLL_MS = 1000
SEND_TIMEOUT_MS = 10_000
# Time for the last messages to leave once the executor ends.
LINGER_MS = 2000
PROGRESS_EVERY_S = 0.1


class Link:
    """The executor's end of the wire.

    Args:
        context: of the process.
        path: of the core's socket.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self._codec = codec.executor_to_core()
        self._incoming = codec.core_to_executor()
        self._socket = context.socket(zmq.DEALER)
        transport.configure(self._socket)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        self._socket.connect(transport.ipc_address(path))

    def send(self, message: ExecutorToCore) -> None:
        """Queue a message.

        Raises:
            Backpressure: the core has not read for SEND_TIMEOUT_MS.
        """
        try:
            self._socket.send(self._codec.encode(message))
        except zmq.Again as error:
            raise Backpressure(f"the core has not read for {SEND_TIMEOUT_MS} ms") from error

    def receive(self, timeout_ms: int) -> CoreToExecutor | None:
        """The next message, None when none comes in time.

        Raises:
            MalformedFrame: what came is no message of the core.
        """
        if not self._socket.poll(timeout_ms):
            return None
        return self._incoming.decode(b"".join(self._socket.recv_multipart()))

    def wait(self, timeout_ms: int, *, frames: bool, wake: int | None) -> None:
        """Wait until something comes.

        Args:
            timeout_ms: at most so long.
            frames: whether a message counts.
            wake: a descriptor that counts when it is readable.
        """
        poller = zmq.Poller()
        if frames:
            poller.register(self._socket, zmq.POLLIN)
        if wake is not None:
            poller.register(wake, zmq.POLLIN)
        poller.poll(timeout_ms)

    def close(self) -> None:
        """Close; what is queued has LINGER_MS to leave."""
        self._socket.close(linger=LINGER_MS)


class ProgressSender:
    """Sends progress, at most one message each PROGRESS_EVERY_S apart from the last one of a phase.

    Args:
        link: to the core.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent_at = 0.0

    def __call__(self, phase: Phase, done: int, total: int, unit: Literal["bytes", "steps"]) -> None:
        """See wire.client.Progress."""
        now = time.monotonic()
        if 0 < done < total and now - self._sent_at < PROGRESS_EVERY_S:
            return
        self._sent_at = now
        self._link.send(Progress(phase, done, total, unit))


def work(config: EngineConfig, socket: Path, epoch: int, began: float) -> int:
    """Be an executor until the core says Shutdown.

    Args:
        config: of the engine.
        socket: of the core.
        epoch: incarnation of this executor.
        began: monotonic time at which the process started.

    Returns:
        The exit status: EXIT_CLEAN, EXIT_REFUSED or EXIT_FAILED.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = Link(context, socket)
    try:
        link.send(ExecutorHello(PROTOCOL, config_hash(config), epoch, os.getpid()))
        executor = start(config, epoch, link, began)
        link.send(executor.ready)
        try:
            serve(link, executor.runner, epoch)
        finally:
            # However it ends: a core that has no use for it ends it by a signal.
            for line in executor.runner.explain():
                log.info("%s", line)
        return EXIT_CLEAN
    except ModelRefused as error:
        log.error("start refused: %s", error)  # noqa: TRY400 - the message says all, the user needs no traceback
        link.send(ExecutorFatal("refused", str(error)))
        return EXIT_REFUSED
    except Exception as error:
        # The border of the process: whatever it was, the core is told.
        log.critical("executor failed", exc_info=error)
        link.send(ExecutorFatal("internal", one_line(error)))
        return EXIT_FAILED
    finally:
        link.close()
        context.term()


def start(config: EngineConfig, epoch: int, link: Link, began: float) -> Executor:
    """Bring the executor up; torch is imported once the model's configuration is known to be good.

    Raises:
        ModelRefused: the model or an option cannot be honoured.
    """
    progress = ProgressSender(link)
    progress("start", 0, 1, "steps")
    spec = read_spec(Path(config.model.model), config.model)
    from model_executor.startup import PhaseClock, bring_up

    clock = PhaseClock(began, progress)
    progress("start", 1, 1, "steps")
    return bring_up(config, spec, epoch, clock, progress)


def serve(link: Link, runner: StepRunner[Any], epoch: int) -> None:
    """Answer plans until Shutdown, in their order. Plans of another epoch are dropped.

    Raises:
        MalformedFrame: what came is no message of the core.
        PlanInvalid: a step is missing, or contradicts the state.
    """
    expected = 1
    ending = False
    with contextlib.closing(collector_of(runner)) as steps:
        while True:
            for result in steps.take():
                link.send(result)
            if ending and not steps.out:
                return
            hears = not ending and steps.out < runner.depth
            link.wait(POLL_MS, frames=hears, wake=steps.fileno())
            message = link.receive(0) if hears else None
            if isinstance(message, Shutdown):
                ending = True
            elif message is not None and message.epoch != epoch:
                log.warning("plan of epoch %d dropped, this is epoch %d", message.epoch, epoch)
            elif message is not None:
                if message.step != expected:
                    raise PlanInvalid("step", expected, message.step)
                expected += 1
                steps.put(runner.launch(message))


def one_line(error: Exception) -> str:
    """Type and message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
