"""Requests that between them make every path of a step run."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct, structs

from engine_core.wire.client import Inspection, Output, Ready
from engine_core.wire.sampling import SamplingParams
from frontend.async_client import AsyncClient
from frontend.errors import GenerationError, RequestRejected

READY_S: Final = 1800.0
INSPECT_S: Final = 30.0
WINDOW: Final = re.compile(r"sliding([0-9]+)")
SHORTEST: Final = 80
BEYOND_WINDOW: Final = 16
ANSWER: Final = 4
# The background answer runs while all others come and go.
LONG_ANSWER: Final = 24
MEMBERS: Final = "sampling"


class Asked(Struct, frozen=True):
    """One request.

    Attributes:
        name: what it is for.
        prompt_len: tokens of its prompt.
        params: of its answer.
    """

    name: str
    prompt_len: int
    params: SamplingParams


class Answered(Struct, frozen=True):
    """What became of a request.

    Attributes:
        name: as of Asked.
        prompt_len: tokens of its prompt.
        tokens: of its answer.
        finish: how it ended.
        logprobs: entries that came with it.
        passed: whether that is what it asked for.
    """

    name: str
    prompt_len: int
    tokens: int
    finish: str
    logprobs: int
    passed: bool


class Session(Struct, frozen=True):
    """All of one visit to a server.

    Attributes:
        ready: what the engine said of itself.
        answers: of all requests.
        inspection: of the core's invariants after them.
        longest: tokens of the longest sequence.
    """

    ready: Ready
    answers: list[Answered]
    inspection: Inspection
    longest: int


def longest_window(classes: Sequence[str]) -> int:
    """The longest sliding window that the names of these classes tell; 0: none has one."""
    return max((int(found[1]) for name in classes if (found := WINDOW.search(name))), default=0)


def prompt_length(classes: Sequence[str]) -> int:
    """Tokens of a prompt that passes every window."""
    return max(SHORTEST, longest_window(classes) + BEYOND_WINDOW)


def step_budget(classes: Sequence[str]) -> int:
    """Tokens of a step that make such a prompt take several."""
    return max(32, prompt_length(classes) // 4)


def alone(length: int) -> Asked:
    """The request that runs by itself: chunks of a prompt, then steps that hold nothing but decoding."""
    return Asked("long prompt in chunks, greedy", length, SamplingParams(temperature=0.0, max_tokens=ANSWER))


def beside(stop: int) -> list[Asked]:
    """Requests that come while another one decodes: every kind of sampling.

    Args:
        stop: a token id to stop at.
    """
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(temperature=0.8),
        "top-k": SamplingParams(temperature=0.8, top_k=5),
        "top-p": SamplingParams(temperature=0.8, top_p=0.9),
        "min-p": SamplingParams(temperature=0.8, min_p=0.05),
        "seed": SamplingParams(temperature=1.0, seed=7),
        "log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
        "min_tokens": SamplingParams(temperature=0.8, min_tokens=3, stop_token_ids=(stop,)),
    }
    made = [Asked(f"{MEMBERS}: {name}", 20 + place, params) for place, (name, params) in enumerate(kinds.items())]
    return [*made, Asked("prompt of one token", 1, SamplingParams(temperature=0.0))]


async def visit(socket: Path, classes: Sequence[str], vocab: int) -> Session:
    """Send every request to the server and wait for its answer.

    Args:
        socket: of the server.
        classes: of its blocks.
        vocab: ids that the tokenizer knows.

    Raises:
        EngineDead, EngineTimeout: there is no server.
    """
    async with await AsyncClient.connect(socket, name="proof") as client:
        ready = await client.wait_ready(READY_S)
        room = ready.model.max_model_len
        ids = min(vocab, ready.model.vocab_size)
        draw = random.Random(0)
        length = max(1, min(prompt_length(classes), room - LONG_ANSWER))

        async def ask(asked: Asked, tokens: int, started: asyncio.Event | None = None) -> Answered:
            prompt = [draw.randrange(ids) for _ in range(min(asked.prompt_len, room - tokens))]
            return await _answer(client, asked, prompt, tokens, started)

        answers = [await ask(alone(length), ANSWER)]
        started = asyncio.Event()
        background = Asked("answer that others join", 8, SamplingParams(temperature=0.0))
        running = asyncio.create_task(ask(background, min(LONG_ANSWER, room - 8), started))
        await started.wait()
        answers += await asyncio.gather(*(ask(each, ANSWER) for each in [alone(length), *beside(ids - 1)]))
        answers.append(await running)
        return Session(ready, answers, await client.inspect(INSPECT_S), length + ANSWER)


async def _answer(
    client: AsyncClient, asked: Asked, prompt: Sequence[int], tokens: int, started: asyncio.Event | None
) -> Answered:
    params = structs.replace(asked.params, max_tokens=tokens, ignore_eos=True)
    outputs: list[Output] = []
    fault = ""
    try:
        # A salt of its own: a cached prefix would leave nothing to compute.
        async for output in client.submit(prompt, params, cache_salt=secrets.token_hex(8)):
            outputs.append(output)
            if started is not None:
                started.set()
    except (GenerationError, RequestRejected) as error:
        fault = f"{type(error).__name__}: {error}"
    finally:
        if started is not None:
            started.set()
    count = sum(len(output.token_ids) for output in outputs)
    logprobs = sum(len(output.logprobs or ()) for output in outputs)
    finish = fault or (outputs[-1].finish if outputs else None) or "none"
    wanted = count if params.logprobs is not None else 0
    ended = (finish == "length" and count == tokens) or (finish == "stop" and bool(params.stop_token_ids))
    return Answered(asked.name, len(prompt), count, finish, logprobs, ended and logprobs == wanted)
