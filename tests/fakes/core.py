"""A fake engine core: it speaks the real wire and answers by a table, in which each token has one successor.

In a test's own loop it is an object with knobs; `python -m tests.fakes.core` is the same as a process, with the knobs
as JSON in the variable TERCET_FAKE_CORE.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq.asyncio
from msgspec import Struct

from engine_core.wire.child import bind_to_parent
from engine_core.wire.client import (
    PROTOCOL,
    STEP_TIME_BOUNDS,
    STEP_TOKEN_BOUNDS,
    Abort,
    Bye,
    CoreToClient,
    Drain,
    EngineState,
    Fatal,
    FatalCode,
    FinishReason,
    Hello,
    Inspect,
    Inspection,
    Model,
    Output,
    Outputs,
    Ping,
    Progress,
    Ready,
    Rejected,
    RequestTimes,
    Status,
    Submit,
    TokenLogprobs,
    Welcome,
)
from engine_core.wire.codec import client_to_core, core_to_client, unpack_ids
from engine_core.wire.config import config_hash, read_config
from engine_core.wire.errors import Backpressure
from engine_core.wire.reports import LoadReport
from engine_core.wire.transport import bind_router, send_now

VARIABLE = "TERCET_FAKE_CORE"
VOCAB = 512
MAX_LEN = 1024
LETTERS = b"abcdefghijklmnopqrstuvwxyz"


def alphabet() -> list[int]:
    """Each letter is followed by the next one, all else by "a"."""
    table = [LETTERS[0]] * VOCAB
    for letter, after in zip(LETTERS, LETTERS[1:] + LETTERS[:1], strict=True):
        table[letter] = after
    return table


def fake_model(path: str = "fake", *, eos: tuple[int, ...] = (256, 257), max_model_len: int = MAX_LEN) -> Model:
    """What the fake says of its model."""
    return Model(
        path=path,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=eos,
        dtype="float32",
        kv_cache_dtype="float32",
        num_kv_blocks=1024,
        block_size=16,
    )


class Knobs(Struct, frozen=True):
    """How the process behaves.

    Attributes:
        load_s: seconds until it is ready.
        step_s: seconds a step.
        refuse: a message: the start is refused with it.
        successors: the token that follows each token; empty: the alphabet.
        max_model_len: of the model.
    """

    load_s: float = 0.0
    step_s: float = 0.0
    refuse: str = ""
    successors: list[int] = []
    max_model_len: int = MAX_LEN


@dataclass
class Live:
    """One open request."""

    client: bytes
    submit: Submit
    prompt_len: int
    last: int
    arrived: float
    count: int = 0
    first: float | None = None


@dataclass
class FakeCore:
    """The fake.

    Attributes:
        path: of its socket.
        model: it says it serves.
        successors: the token that follows each token.
        step_s: seconds a step; 0: as fast as it goes.
        digest: hash of the configuration it says it runs.
        cached_tokens: reported for each request.
        reject: gives a Rejected for a submission, or None to take it.
        gate: while cleared, no step is made.
        submits, aborted: what came.
        pings: how many came.
    """

    path: Path
    model: Model = field(default_factory=fake_model)
    successors: Sequence[int] = field(default_factory=alphabet)
    step_s: float = 0.0
    digest: str = ""
    cached_tokens: int = 0
    reject: Callable[[Submit], Rejected | None] = lambda _: None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    submits: list[Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    pings: int = 0
    state: EngineState = "loading"
    drained: bool = False

    def __post_init__(self) -> None:
        self.live: dict[tuple[bytes, str], Live] = {}
        self.finished: Counter[str] = Counter()
        self.generated = 0
        self.steps = 0
        self._clients: set[bytes] = set()
        self._decode = client_to_core().decode
        self._encode = core_to_client().encode
        self._work = asyncio.Event()
        self._greeted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.gate.set()

    async def start(self, *, ready: bool = True) -> None:
        """Listen, and take requests unless told otherwise."""
        self._context = zmq.asyncio.Context()
        self._socket = bind_router(self._context, self.path)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._run())]
        if ready:
            self.become_ready()

    async def stop(self) -> None:
        """Vanish, as a killed process does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._socket.closed:
            self._socket.close(linger=0)
            await asyncio.to_thread(self._context.term)

    async def greeted(self) -> None:
        """Return when a client has said hello."""
        await self._greeted.wait()

    async def failed(self) -> None:
        """Return when a task of the fake has failed, by raising its error."""
        await asyncio.gather(*self._tasks)

    def become_ready(self) -> None:
        """Tell all clients that requests are taken."""
        self.state = "ready"
        self.tell_all(self._ready())

    def tell_all(self, message: CoreToClient) -> None:
        """Send a message to every client."""
        for client in self._clients:
            self._send(client, message)

    def die(self, code: FatalCode, message: str) -> None:
        """Tell all clients that the engine ends."""
        self.state = "dead"
        self.live.clear()
        self.tell_all(Fatal(code, message))

    def _ready(self) -> Ready:
        load = LoadReport(
            model=self.model.path,
            revision="fake",
            layer_map=[0],
            tensors=[],
            shards_opened=[],
            shards_skipped=[],
            bytes_read=0,
            bytes_materialized=0,
            counts={},
            page_cache=None,
            seconds={},
        )
        return Ready(model=self.model, load=load, kernels=[], startup_s={}, epoch=1)

    def _send(self, client: bytes, message: CoreToClient) -> None:
        # A client that left is no error of the fake.
        with contextlib.suppress(Backpressure):
            send_now(self._socket, client, self._encode(message))

    async def _receive(self) -> None:
        while True:
            client, frame = await self._socket.recv_multipart()
            self._handle(client, self._decode(frame))

    def _handle(self, client: bytes, message: object) -> None:
        match message:
            case Hello():
                self._hello(client)
            case Submit():
                self._submit(client, message)
            case Abort():
                for name in message.request_ids:
                    self._abort(client, name)
            case Ping():
                self.pings += 1
                self._send(client, self.status(message.seq))
            case Inspect():
                self._send(client, Inspection(message.seq, free=1000, cached=0, owned=24, total=1024, violations=[]))
            case Drain():
                self.drained = True
            case Bye():
                self._bye(client)

    def _hello(self, client: bytes) -> None:
        self._clients.add(client)
        self._greeted.set()
        self._send(client, Welcome(PROTOCOL, self.digest, self.state, self.model.path))
        if self.state == "ready":
            self._send(client, self._ready())

    def _bye(self, client: bytes) -> None:
        for owner, name in list(self.live):
            if owner == client:
                self._abort(owner, name)
        self._clients.discard(client)

    def _submit(self, client: bytes, submit: Submit) -> None:
        self.submits.append(submit)
        refusal = self.reject(submit)
        if refusal is not None:
            self._send(client, refusal)
            return
        prompt, output = unpack_ids(submit.prompt), unpack_ids(submit.output)
        last = output[-1] if output else prompt[-1]
        live = Live(client, submit, len(prompt), last, time.monotonic(), count=len(output))
        self.live[client, submit.request_id] = live
        self._work.set()

    def _abort(self, client: bytes, name: str) -> None:
        if self.live.pop((client, name), None) is not None:
            self.aborted.append(name)
            self.finished["abort"] += 1
            self._send(client, Outputs(self.steps, [Output(name, [], finish="abort")]))

    async def _run(self) -> None:
        while True:
            if not self.live:
                self._work.clear()
            await self._work.wait()
            await self.gate.wait()
            self._step()
            await asyncio.sleep(self.step_s)

    def _step(self) -> None:
        self.steps += 1
        by_client: dict[bytes, list[Output]] = {}
        for live in list(self.live.values()):
            by_client.setdefault(live.client, []).append(self._advance(live))
        for client, outputs in by_client.items():
            self._send(client, Outputs(self.steps, outputs))

    def _advance(self, live: Live) -> Output:
        params = live.submit.params
        name = live.submit.request_id
        now = time.monotonic()
        live.first = now if live.first is None else live.first
        live.last = self.successors[live.last]
        live.count += 1
        self.generated += 1
        finish, stop = self._finish(live)
        if finish is not None:
            del self.live[live.client, name]
            self.finished[finish] += 1
        return Output(
            name,
            [live.last],
            finish=finish,
            stop_token_id=stop,
            logprobs=None if params.logprobs is None else [fake_logprobs(live.last, params.logprobs)],
            cached_tokens=self.cached_tokens,
            times=RequestTimes(0.001, live.first - live.arrived, now - live.first, 0) if finish else None,
        )

    def _finish(self, live: Live) -> tuple[FinishReason | None, int | None]:
        params = live.submit.params
        ends = params.stop_token_ids if params.ignore_eos else (*self.model.eos_token_ids, *params.stop_token_ids)
        if live.last in ends and live.count > params.min_tokens:
            return "stop", live.last
        room = self.model.max_model_len - live.prompt_len
        if live.count >= min(room, room if params.max_tokens is None else params.max_tokens):
            return "length", None
        return None, None

    def status(self, seq: int = 0) -> Status:
        """What a ping is answered with."""
        return Status(
            seq=seq,
            state=self.state,
            epoch=1,
            executor_pid=os.getpid(),
            running=len(self.live),
            kv_blocks_total=self.model.num_kv_blocks,
            kv_blocks_used=len(self.live),
            steps=self.steps,
            step_time_buckets=[self.steps] + [0] * len(STEP_TIME_BOUNDS),
            step_token_buckets=[self.steps] + [0] * len(STEP_TOKEN_BOUNDS),
            finished=dict(self.finished),
            generation_tokens=self.generated,
        )


def fake_logprobs(token: int, count: int) -> TokenLogprobs:
    """The chosen token is the likeliest; the ids after it follow."""
    ids = [(token + rank) % VOCAB for rank in range(count)]
    return TokenLogprobs(-0.25, ids, [-0.25 * (rank + 1) for rank in range(count)])


async def _main(config_path: Path, socket: Path, knobs: Knobs) -> int:
    config = read_config(config_path)
    core = FakeCore(
        socket,
        fake_model(config.model.model, eos=config.text.eos_token_ids, max_model_len=knobs.max_model_len),
        knobs.successors or alphabet(),
        step_s=knobs.step_s,
        digest=config_hash(config),
    )
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await core.start(ready=False)
    stopped = asyncio.create_task(ended.wait())
    failed = asyncio.create_task(core.failed())
    loaded = asyncio.create_task(_load(core, knobs))
    await asyncio.wait({stopped, failed, loaded}, return_when=asyncio.FIRST_COMPLETED)
    if loaded.done() and not loaded.result():
        await asyncio.sleep(0.2)  # the refusal is on its way
        return 3
    await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    loaded.cancel()
    await core.stop()
    return 0 if stopped.done() else 4


async def _load(core: FakeCore, knobs: Knobs) -> bool:
    steps = 4
    for done in range(steps):
        await asyncio.sleep(knobs.load_s / steps)
        core.tell_all(Progress("load", done + 1, steps))
    if knobs.refuse:
        await core.greeted()
        core.die("start_refused", knobs.refuse)
        return False
    core.become_ready()
    return True


def main() -> int:
    """Run as a process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--incarnation", type=int, default=1)
    parser.add_argument("--parent-fd", type=int, required=True)
    args = parser.parse_args()
    bind_to_parent(args.parent_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    knobs = msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=Knobs)
    return asyncio.run(_main(args.config, args.socket, knobs))


if __name__ == "__main__":
    sys.exit(main())
