"""The executor as the core sees it: a process, a socket, and the plans that are out.

An incarnation lives from `start` until it is lost, once: it ends, says that it must, breaks the protocol, or lets a
deadline pass. `on_lost` is told why; what follows is decided there.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple

import zmq
import zmq.asyncio

from engine_core.wire import codec
from engine_core.wire.child import Child, ending
from engine_core.wire.client import PROTOCOL, Fatal, FatalCode, Progress
from engine_core.wire.config import EngineConfig, config_hash
from engine_core.wire.errors import Backpressure, MalformedFrame
from engine_core.wire.executor import ExecutorFatal, ExecutorHello, ExecutorReady, ExecutorToCore, StepPlan, StepResult
from engine_core.wire.pulse import Pulse
from engine_core.wire.transport import send_now

log = logging.getLogger(__name__)

# Time for what an executor sent before its end to arrive.
LAST_WORDS_S: Final = 0.2
# An executor whose socket is gone ends soon, or counts as lost.
UNREACHABLE_S: Final = 1.0
END_GRACE_S: Final = 3.0
# Exit statuses of an executor that was told something it cannot do.
REFUSING_STATUSES: Final = (2, 3)
# Statuses of one that was told to end, or killed, by somebody else; it ends with 0 only when told to.
OUTSIDE_STATUSES: Final = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT, -signal.SIGQUIT)
# A process that is stopped for so long is no momentary matter.
STOPPED_S: Final = 1.0
# One that owes a result and has used no processor time for so long is stuck: both computing and waiting for a device
# use some.
IDLE_S: Final = 5.0


class SentPlan(NamedTuple):
    """A plan that is out.

    Attributes:
        step: of the plan.
        tokens, rows: that it computes.
        queued: whether another plan was out when it was sent.
    """

    step: int
    tokens: int
    rows: int
    queued: bool


class ExecutorClient:
    """One executor at a time, started, spoken to, watched and ended.

    Args:
        socket: the ROUTER bound at socket_path.
        config, config_path: the configuration, and the file the executor reads it from.
        socket_path: where the executor connects.
        module: the Python module that is the executor.

    Attributes:
        epoch: number of the incarnation, from 1; 0 before the first.
        malformed: frames dropped.
        sent: plans that are out, oldest first.
        outside: whether the latest loss was caused by somebody else: a signal, a stop.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        *,
        config: EngineConfig,
        config_path: Path,
        socket_path: Path,
        module: str,
    ) -> None:
        self._socket = socket
        self._config = config
        self._config_path = config_path
        self._socket_path = socket_path
        self._module = module
        self._on_lost: Callable[[Fatal], None] | None = None
        self._incoming = codec.executor_to_core()
        self._outgoing = codec.core_to_executor()
        self._child: Child | None = None
        self._identity: bytes | None = None
        self._started = 0.0
        self._unreachable: float | None = None
        self._conclusion: asyncio.TimerHandle | None = None
        self._phase: Literal["none", "starting", "ready"] = "none"
        self._gone = False
        self.epoch = 0
        self.malformed = 0
        self.sent: deque[SentPlan] = deque()
        self.outside = False
        self._pulse = Pulse(0, 0.0)

    @property
    def pid(self) -> int:
        """Process id, 0 while there is none."""
        return 0 if self._child is None else self._child.pid

    @property
    def ready(self) -> bool:
        """Whether it takes plans."""
        return self._phase == "ready" and not self._gone

    def start(self, epoch: int, now: float, on_lost: Callable[[Fatal], None]) -> None:
        """Start an incarnation; the one before must have been ended.

        Args:
            epoch: its number.
            now: monotonic seconds.
            on_lost: called once if it is lost, with what clients would be told.

        Raises:
            OSError: no process could be made.
        """
        assert self._child is None, "one executor at a time"
        arguments = ["-m", self._module, "--config", str(self._config_path)]
        arguments += ["--socket", str(self._socket_path), "--epoch", str(epoch)]
        self._child = Child.spawn("executor", arguments)
        self.epoch, self._started = epoch, now
        self._identity, self._unreachable = None, None
        self._phase, self._gone, self._on_lost = "starting", False, on_lost
        self._pulse = Pulse(self._child.pid, now)
        self.sent.clear()
        asyncio.get_running_loop().add_reader(self._child.fileno(), self._child_ended)

    def end(self, grace_s: float = END_GRACE_S) -> None:
        """End the process, if there is one: asked first, forced when `grace_s` have passed."""
        child = self._let_go()
        if child is not None:
            status = child.end(grace_s)
            log.info("executor (pid %d, epoch %d) ended with status %d", child.pid, self.epoch, status)

    async def retire(self) -> None:
        """End the process of a lost incarnation, by force; the event loop goes on meanwhile."""
        child = self._let_go()
        if child is not None:
            await asyncio.to_thread(child.end, 0.0)

    def _let_go(self) -> Child | None:
        self._phase = "none"
        self.sent.clear()
        if self._conclusion is not None:
            self._conclusion.cancel()
            self._conclusion = None
        child, self._child = self._child, None
        if child is not None:
            asyncio.get_running_loop().remove_reader(child.fileno())
        return child

    def close(self) -> None:
        """Close the socket; the executor must have been ended."""
        assert self._child is None, "close follows end"
        self._socket.close(linger=0)

    def send(self, plan: StepPlan, now: float) -> None:
        """Hand a plan over."""
        assert self._identity is not None, "plans follow the executor's ready"
        tokens = sum(row.count for row in plan.rows)
        self.sent.append(SentPlan(plan.step, tokens, len(plan.rows), queued=bool(self.sent)))
        try:
            send_now(self._socket, self._identity, self._outgoing.encode(plan))
        except Backpressure:
            # Most likely it is ending; the process says how, and check() has the last word.
            if self._unreachable is None:
                self._unreachable = now

    def landed(self, result: StepResult) -> SentPlan | None:
        """Match a result with its plan; None for a result of an older epoch or of no plan that is out."""
        if self._phase != "ready" or result.epoch != self.epoch or not self.sent or result.step < self.sent[0].step:
            return None
        if result.step > self.sent[0].step:
            missing = self.sent[0].step
            self.at_fault(f"result of step {result.step} came before that of step {missing}")
            return None
        return self.sent.popleft()

    async def receive(self) -> ExecutorToCore:
        """Wait for a message that the engine has to see: Progress, ExecutorReady or StepResult."""
        while True:
            frames = await self._socket.recv_multipart()
            message = self._decode(frames)
            if message is not None and self._for_engine(frames[0], message):
                return message

    def check(self, now: float) -> None:
        """Hold the executor to its deadlines, other than that of a step."""
        limit = self._config.deadlines.start_timeout
        if self._phase == "starting" and now - self._started > limit:
            self._lose("stalled", f"executor: not ready within start_timeout {limit:g} s")
        elif self._unreachable is not None and now - self._unreachable > UNREACHABLE_S:
            self._lose("executor_died", f"executor (pid {self.pid}) closed its socket")
        self._check_stopped(now)

    def _check_stopped(self, now: float) -> None:
        if self._child is None:
            return
        self._pulse.look(now)
        seconds, limit = self._pulse.stopped_s(now), self._config.deadlines.step_timeout
        if seconds > limit:
            why = f"executor (pid {self.pid}): stopped by a signal for {seconds:.1f} s, step_timeout {limit:g} s"
            self._lose("stalled", why, outside=True)

    def stall(self, now: float, step_age: float) -> str:
        """Why no step has made progress for `step_age` seconds, as far as the system shows it; else nothing."""
        if self._pulse.stopped_s(now) > STOPPED_S:
            return f"executor (pid {self.pid}) has been stopped by a signal for {self._pulse.stopped_s(now):.1f} s"
        if self.sent and min(step_age, self._pulse.idle_s(now)) > IDLE_S:
            return f"executor (pid {self.pid}) owes a step, but has done nothing for {self._pulse.idle_s(now):.1f} s"
        return ""

    def forgive(self, seconds: float) -> None:
        """The core itself was stopped for so long: nobody looked at the executor."""
        self._started += seconds
        self._pulse.forgive(seconds)

    def stalled(self, seconds: float) -> None:
        """The engine saw no progress for this long: the incarnation is lost."""
        limit = self._config.deadlines.step_timeout
        why = f"executor (pid {self.pid}): no step ended for {seconds:.1f} s, step_timeout {limit:g} s"
        self._lose("stalled", why, outside=self._pulse.stopped)

    def at_fault(self, why: str) -> None:
        """What the executor sent cannot be used: the incarnation is lost."""
        self._lose("executor_died", f"executor (pid {self.pid}): {why}")

    def _for_engine(self, identity: bytes, message: ExecutorToCore) -> bool:
        match message:
            case ExecutorHello():
                self._hello(identity, message)
                return False
            case _ if identity != self._identity:
                self._drop(f"{type(message).__name__} of a stranger")
                return False
            case _ if self._phase == "none":
                # Of an incarnation that is lost already.
                return False
            case ExecutorFatal():
                self._said_fatal(message)
                return False
            case ExecutorReady():
                return self._said_ready(message)
            case Progress() | StepResult():
                return True

    def _decode(self, frames: list[bytes]) -> ExecutorToCore | None:
        if len(frames) != 2:
            self._drop(f"{len(frames)} frames, expected 2")
            return None
        try:
            return self._incoming.decode(frames[1])
        except MalformedFrame as error:
            self._drop(str(error))
            return None

    def _drop(self, why: str) -> None:
        self.malformed += 1
        log.log(logging.WARNING if self.malformed == 1 else logging.DEBUG, "dropped a frame at executor.sock: %s", why)

    def _hello(self, identity: bytes, hello: ExecutorHello) -> None:
        if hello.pid != self.pid or self._phase == "none" or self._identity is not None:
            self._drop(f"hello of pid {hello.pid}, the executor is {self.pid}, and {self._phase}")
            return
        for field, expected, given in (
            ("protocol", PROTOCOL, hello.protocol),
            ("config_hash", config_hash(self._config), hello.config_hash),
            ("epoch", self.epoch, hello.epoch),
        ):
            if expected != given:
                self._lose("protocol", f"executor: {field}: expected {expected}, the peer has {given}")
                return
        self._identity = identity

    def _said_fatal(self, fatal: ExecutorFatal) -> None:
        if fatal.code == "refused" and self._phase == "starting":
            self._lose("start_refused", fatal.message)
        else:
            self._lose("executor_died", f"executor (pid {self.pid}): {fatal.message}")

    def _said_ready(self, ready: ExecutorReady) -> bool:
        if ready.epoch != self.epoch or self._phase != "starting":
            self._drop(f"ready of epoch {ready.epoch} while {self._phase}, the executor's epoch is {self.epoch}")
            return False
        self._phase = "ready"
        return True

    def _child_ended(self) -> None:
        """The process is gone; its last frames may still be on their way."""
        assert self._child is not None, "the sentinel is watched while there is a child"
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._child.fileno())
        self._gone = True
        self._conclusion = loop.call_later(LAST_WORDS_S, self._conclude)

    def _conclude(self) -> None:
        assert self._child is not None, "end() cancels the conclusion"
        status = self._child.status()
        died = f"executor (pid {self._child.pid}) ended: {ending(status or 0)}"
        refused = self._phase == "starting" and status in REFUSING_STATUSES
        outside = status in OUTSIDE_STATUSES
        self._lose("start_refused" if refused else "executor_died", died, outside=outside)

    def _lose(self, code: FatalCode, message: str, *, outside: bool = False) -> None:
        """Only the first reason counts: what follows is its consequence."""
        if self._phase != "none" and self._on_lost is not None:
            self._phase, self.outside = "none", outside
            self._on_lost(Fatal(code, message))
