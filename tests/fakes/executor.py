"""An executor without a model: it speaks the real wire, and its next token is a hash of the sequence so far.

`python -m tests.fakes.executor --config P --socket S --epoch E --parent-fd N`

The sequence is read back through the block table out of a pretended KV cache, so that a block given to two sequences,
freed too early, or shared wrongly changes the tokens. What it should do wrong is told by a text "key=value,key=value":
the environment variable TERCET_FAKE_EXECUTOR, or the model "fake:key=value,...". Keys: the fields of Script. A text
"@PATH" names a file with a script on each line: each executor that starts takes the first line away, but the last.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import zlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq
from msgspec import Struct

from engine_core.wire import codec
from engine_core.wire.child import bind_to_parent
from engine_core.wire.client import PROTOCOL, Progress, TokenLogprobs
from engine_core.wire.config import EngineConfig, config_hash, read_config
from engine_core.wire.executor import (
    CoreToExecutor,
    ExecutorFatal,
    ExecutorHello,
    ExecutorReady,
    ExecutorToCore,
    KvGroup,
    Row,
    Shutdown,
    SlotFill,
    StepPlan,
    StepResult,
)
from engine_core.wire.reports import KernelCandidate, KernelChoice, LoadReport
from engine_core.wire.sampling import SamplingParams
from engine_core.wire.transport import configure, ipc_address

SCRIPT_VARIABLE = "TERCET_FAKE_EXECUTOR"
MODEL_PREFIX = "fake:"
UNWRITTEN = -1


class Script(Struct, frozen=True, forbid_unknown_fields=True):
    """What to do, and what to do wrong. Steps count from 1; 0 is never.

    Attributes:
        vocab, blocks, max_model_len, max_num_batched_tokens: told in ready; the configuration's values win.
        load_s: seconds that loading takes. delay_s: seconds a step takes.
        never_ready: 1: load for ever.
        refuse: say this and end. fail_load_with: end with this status while loading, without a word.
        protocol: version told at hello. wrong_hash: 1: tell another configuration's hash.
        exit_at: end with status 9 at this step. fatal_at: say ExecutorFatal "internal" at this step.
        garbage_at: send garbage before the result of this step. lose_at: send garbage instead of the result.
        stale_at: send a result of the epoch before, first. hang_at: never answer this step.
        deafen_at: close the socket at this step, and live on.
        short_at: leave the last token out of the result of this step.
        deaf: 1: ignore SIGTERM.
        poison: end with status 9 when a prompt with this token is to be computed.
    """

    vocab: int = 512
    blocks: int = 256
    max_model_len: int = 1024
    max_num_batched_tokens: int = 512
    load_s: float = 0.0
    delay_s: float = 0.0
    never_ready: int = 0
    refuse: str = ""
    fail_load_with: int = 0
    protocol: int = PROTOCOL
    wrong_hash: int = 0
    exit_at: int = 0
    fatal_at: int = 0
    garbage_at: int = 0
    lose_at: int = 0
    stale_at: int = 0
    hang_at: int = 0
    deafen_at: int = 0
    short_at: int = 0
    deaf: int = 0
    poison: int = -1


def parse_script(text: str) -> Script:
    """The script in "key=value,key=value".

    Raises:
        msgspec.ValidationError: an unknown key, or a value of the wrong kind.
    """
    pairs = dict(part.split("=", 1) for part in text.split(",") if part)
    return msgspec.convert(pairs, Script, strict=False)


def script_of(config: EngineConfig) -> Script:
    """The script that the environment or the model's name tells."""
    told = os.environ.get(SCRIPT_VARIABLE, "")
    if not told and config.model.model.startswith(MODEL_PREFIX):
        told = config.model.model.removeprefix(MODEL_PREFIX)
    return parse_script(_next_line(Path(told[1:])) if told.startswith("@") else told)


def _next_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() or [""]
    if len(lines) > 1:
        path.write_text("\n".join(lines[1:]), encoding="utf-8")
    return lines[0]


def next_token(tokens: Iterable[int], vocab: int, banned: Sequence[int] = ()) -> int:
    """The token that follows `tokens`: a hash of them, the next one up that is not banned."""
    token = zlib.crc32(array("i", tokens).tobytes()) % vocab
    while token in banned:
        token = (token + 1) % vocab
    return token


def continuation(prompt: Sequence[int], count: int, vocab: int = 512) -> list[int]:
    """The first `count` tokens that the executor gives after `prompt`, when no stop token is banned or met."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


class _Slot:
    """A sequence: its known tokens by position, and its block table."""

    def __init__(self, fill: SlotFill) -> None:
        self.tokens = list(codec.unpack_ids(fill.token_ids))
        self.prompt_len = fill.prompt_len
        self.params: SamplingParams = fill.params
        self.blocks = list(fill.blocks[0])


class Device:
    """The pretended device: block size and count, the cache's content, and the slots."""

    def __init__(self, script: Script, block_size: int, num_blocks: int, eos: Sequence[int]) -> None:
        self._script = script
        self._block_size = block_size
        self._eos = eos
        self._cache = [UNWRITTEN] * (num_blocks * block_size)
        self._slots: dict[int, _Slot] = {}

    def poisoned(self, plan: StepPlan) -> bool:
        """Whether a prompt of the plan holds the poison."""
        for fill in plan.fills:
            self._slots[fill.slot] = _Slot(fill)
        slots = [self._slots[row.slot] for row in plan.rows]
        return any(self._script.poison in slot.tokens[: slot.prompt_len] for slot in slots)

    def run(self, plan: StepPlan) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """Compute a plan: sampled tokens, and log-probabilities if any row asked."""
        for fill in plan.fills:
            self._slots[fill.slot] = _Slot(fill)
        for row in plan.rows:
            self._write(row)
        sampling = [row for row in plan.rows if row.sample]
        tokens = [self._sample(row) for row in sampling]
        wanted = [self._slots[row.slot].params.logprobs for row in sampling]
        if all(count is None for count in wanted):
            return tokens, None
        vocab = self._script.vocab
        return tokens, [
            None if count is None else TokenLogprobs(-1.0, [(token + i) % vocab for i in range(count)], [-1.0] * count)
            for token, count in zip(tokens, wanted, strict=True)
        ]

    def _place(self, slot: _Slot, position: int) -> int:
        return slot.blocks[position // self._block_size] * self._block_size + position % self._block_size

    def _write(self, row: Row) -> None:
        slot = self._slots[row.slot]
        for blocks in row.blocks:
            slot.blocks += blocks
        for position in range(row.start, row.start + row.count):
            self._cache[self._place(slot, position)] = slot.tokens[position]

    def _sample(self, row: Row) -> int:
        slot = self._slots[row.slot]
        length = row.start + row.count
        seen = [self._cache[self._place(slot, position)] for position in range(length)]
        params = slot.params
        banned: list[int] = []
        if length - slot.prompt_len < params.min_tokens:
            banned = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos)]
        token = next_token(seen, self._script.vocab, banned)
        # A sequence that was preempted knows tokens beyond: the new one must agree, and replaces it.
        slot.tokens[length:] = [token]
        return token


class FakeExecutor:
    """The process: socket, script and device."""

    def __init__(self, config: EngineConfig, script: Script, socket: zmq.Socket[bytes], epoch: int) -> None:
        self._config = config
        self._script = script
        self._socket = socket
        self._epoch = epoch
        self._incoming = codec.core_to_executor()
        self._outgoing = codec.executor_to_core()
        self._blocks = config.cache.num_kv_blocks or script.blocks
        self._device = Device(script, config.cache.block_size, self._blocks, config.text.eos_token_ids)

    def send(self, message: ExecutorToCore) -> None:
        """Send to the core."""
        self._socket.send(self._outgoing.encode(message))

    def load(self) -> None:
        """Everything up to ready."""
        script = self._script
        digest = "0" * 16 if script.wrong_hash else config_hash(self._config)
        self.send(ExecutorHello(script.protocol, digest, self._epoch, os.getpid()))
        if script.refuse:
            self.send(ExecutorFatal("refused", script.refuse))
            self.leave(3)
        if script.fail_load_with:
            self.leave(script.fail_load_with)
        self.send(Progress("load", 0, 100, "bytes"))
        time.sleep(script.load_s)
        self.send(Progress("load", 100, 100, "bytes"))
        while script.never_ready:
            signal.pause()
        self.send(self._ready())

    def serve(self) -> None:
        """Run plans until told to end."""
        while not isinstance(message := self._receive(), Shutdown):
            self._step(message)

    def leave(self, status: int) -> NoReturn:
        """End; what was sent still leaves."""
        self._socket.close(linger=1000)
        self._socket.context.term()
        sys.exit(status)

    def _receive(self) -> CoreToExecutor:
        return self._incoming.decode(self._socket.recv())

    def _ready(self) -> ExecutorReady:
        script, config = self._script, self._config
        counts = LoadReport(
            model=config.model.model,
            revision="fake",
            layer_map=[],
            tensors=[],
            shards_opened=[],
            shards_skipped=[],
            bytes_read=0,
            bytes_materialized=0,
            counts={},
            page_cache=None,
            seconds={},
        )
        return ExecutorReady(
            epoch=self._epoch,
            max_model_len=config.model.max_model_len or script.max_model_len,
            vocab_size=script.vocab,
            dtype="float32",
            kv_cache_dtype="float32",
            device="cpu",
            kv_groups=[KvGroup(None, self._blocks)],
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens or script.max_num_batched_tokens,
            load=counts,
            kernels=[KernelChoice("attention", "none", "fake", [KernelCandidate("fake", [])])],
            startup_s={"start": 0.0, "load": script.load_s},
            memory={},
        )

    def _step(self, plan: StepPlan) -> None:
        script, step = self._script, plan.step
        if step == script.exit_at:
            self.leave(9)
        if script.poison >= 0 and self._device.poisoned(plan):
            self.leave(9)
        if step == script.fatal_at:
            self.send(ExecutorFatal("internal", "the device is on fire"))
            self.leave(4)
        if step in (script.garbage_at, script.lose_at):
            self._socket.send(b"\x93\xa6result\xff\xff")
        if step == script.deafen_at:
            self._socket.close(linger=0)
        while step in (script.hang_at, script.deafen_at):
            signal.pause()
        started = time.monotonic_ns()
        time.sleep(script.delay_s)
        tokens, logprobs = self._device.run(plan)
        if step == script.short_at:
            tokens.pop()
        result = StepResult(plan.epoch, step, tokens, logprobs, started, time.monotonic_ns())
        if step == script.stale_at:
            self.send(msgspec.structs.replace(result, epoch=plan.epoch - 1))
        if step != script.lose_at:
            self.send(result)


def main() -> None:
    """Run a fake executor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--parent-fd", type=int, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    bind_to_parent(options.parent_fd)
    config = read_config(options.config)
    script = script_of(config)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if script.deaf else lambda *_: sys.exit(0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    configure(socket)
    socket.connect(ipc_address(options.socket))
    executor = FakeExecutor(config, script, socket, options.epoch)
    executor.load()
    executor.serve()
    executor.leave(0)


if __name__ == "__main__":
    main()
