"""Random traces: what happens to an engine, tick by tick, and what each request must get."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Literal

from engine_core.scheduler import RequestKey
from engine_core.wire.client import FinishReason, Submit
from engine_core.wire.codec import pack_ids
from engine_core.wire.executor import KvGroup
from engine_core.wire.sampling import SamplingParams
from tests.model.executor import Model, next_token

Groups = Literal["full", "window", "full and window", "two windows"]

CLIENTS = (b"client a", b"client b")


@dataclass(frozen=True)
class Request:
    """A request and the answer it gets alone: all its output, what is new of it, and why it ends."""

    key: RequestKey
    submit: Submit
    expected: list[int]
    finish: FinishReason


@dataclass(frozen=True)
class Tick:
    """What happens before the engine's next turn. Seconds pass first."""

    seconds: float
    arrivals: list[Request] = field(default_factory=list)
    aborts: list[RequestKey] = field(default_factory=list)
    restart: bool = False


@dataclass(frozen=True)
class Trace:
    """A device and what happens on it."""

    model: Model
    ticks: list[Tick]

    @property
    def requests(self) -> list[Request]:
        """All requests, in order of arrival."""
        return [request for tick in self.ticks for request in tick.arrivals]


def alone(prompt: list[int], params: SamplingParams, seed: int, model: Model) -> tuple[list[int], FinishReason]:
    """The output of a request with nobody else about: one token after the other, by the rules of the wire."""
    tokens = array("i", prompt)
    room = model.room - len(prompt)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos))
    while True:
        tokens.append(next_token(tokens, len(prompt), params, seed, model))
        made = len(tokens) - len(prompt)
        if tokens[-1] in stops and made >= params.min_tokens:
            return tokens[len(prompt) :].tolist(), "stop"
        if made == most:
            return tokens[len(prompt) :].tolist(), "length"


def plain_request(number: int, prompt_len: int, max_tokens: int, model: Model, *, priority: int = 0) -> Request:
    """A request of exact lengths, with a prompt of its own."""
    rng = random.Random(number)
    prompt = [rng.randrange(model.vocab) for _ in range(prompt_len)]
    params = SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True)
    expected, finish = alone(prompt, params, number, model)
    submit = Submit(request_id=f"r{number}", prompt=pack_ids(prompt), params=params, priority=priority)
    return Request((CLIENTS[0], submit.request_id), submit, expected, finish)


def _params(rng: random.Random, model: Model) -> SamplingParams:
    max_tokens = rng.choice([None, 1, 2, 3, rng.randint(4, 24), rng.randint(4, 24)])
    least = rng.choice([0, 0, 0, rng.randint(1, 6)])
    return SamplingParams(
        seed=rng.getrandbits(40),
        max_tokens=max_tokens,
        min_tokens=least if max_tokens is None else min(least, max_tokens),
        stop_token_ids=tuple(rng.sample(range(model.vocab), rng.choice([0, 0, 0, 1, 2]))),
        ignore_eos=rng.random() < 0.3,
    )


def _prompt(rng: random.Random, trunks: list[list[int]], model: Model, longest: int) -> list[int]:
    """Often a beginning that others have too, cut at a block border or near it."""
    trunk = rng.choice(trunks)
    cut = rng.randint(0, len(trunk))
    if rng.random() < 0.5:
        cut = min(len(trunk), cut // model.block_size * model.block_size)
    tail = [rng.randrange(model.vocab) for _ in range(rng.choice([0, 0, 1, rng.randint(1, 12)]))]
    return (trunk[:cut] + tail or [rng.randrange(model.vocab)])[:longest]


def _request(rng: random.Random, number: int, trunks: list[list[int]], model: Model) -> Request:
    longest = model.room - 1
    prompt = _prompt(rng, trunks, model, longest)
    params = _params(rng, model)
    assert params.seed is not None
    expected, finish = alone(prompt, params, params.seed, model)
    made = rng.randrange(len(expected)) if rng.random() < 0.15 else 0
    submit = Submit(
        request_id=f"r{number}",
        prompt=pack_ids(prompt),
        params=params,
        priority=rng.choice([0, 0, 1, 5, -3]),
        cache_salt=rng.choice([None, None, None, "salt", "s"]),
        output=pack_ids(expected[:made]),
    )
    return Request((rng.choice(CLIENTS), submit.request_id), submit, expected[made:], finish)


def random_groups(rng: random.Random, block_size: int, kind: Groups) -> tuple[KvGroup, ...]:
    """Tiny pools: some hold one sequence, some all."""
    full = KvGroup(None, -(-rng.choice([24, 64, 160]) // block_size))
    first, second = rng.sample([1, 2, 3, 5, 8, 13, 30], 2)
    windows = {"full": [], "window": [first], "full and window": [first], "two windows": [first, second]}[kind]
    sliding = []
    for window in windows:
        steady = KvGroup(window, 0).steady_blocks(block_size)
        assert steady is not None
        # The last is smaller than what its window needs: it bounds the length instead.
        sliding.append(KvGroup(window, rng.choice([steady, steady + 1, 2 * steady, 6 * steady, -(-24 // block_size)])))
    return tuple(([full] if kind.startswith("full") else []) + sliding)


def random_model(rng: random.Random, kind: Groups = "full") -> Model:
    """A tiny device."""
    block_size = rng.choice([1, 2, 3, 4, 8])
    max_model_len = rng.randint(24, 64)
    groups = random_groups(rng, block_size, kind)
    return Model(
        vocab=24,
        eos=(0, 7),
        groups=groups,
        block_size=block_size,
        max_num_seqs=rng.choice([1, 2, 3, 5, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 8, 20, 64]),
        max_model_len=max_model_len,
    )


def random_trace(seed: int, *, requests: int = 12, kind: Groups = "full") -> Trace:
    """A trace from a seed: arrivals in bursts, shared beginnings, aborts at any time, now and then a new executor."""
    rng = random.Random(seed)
    model = random_model(rng, kind)
    trunks = [[rng.randrange(model.vocab) for _ in range(rng.randint(4, 40))] for _ in range(rng.randint(1, 3))]
    ticks: list[Tick] = []
    keys: list[RequestKey] = []
    restarts = rng.random() < 0.3
    number = 0
    while number < requests:
        burst = min(rng.choice([0, 0, 1, 1, 2, 5]), requests - number)
        arrivals = [_request(rng, number + offset, trunks, model) for offset in range(burst)]
        number += burst
        keys += [request.key for request in arrivals]
        aborts = [key for key in keys if rng.random() < 0.02]
        restart = restarts and rng.random() < 0.1
        ticks.append(Tick(rng.choice([0.0, 0.01, 0.01, 3.0]), arrivals, aborts, restart))
    return Trace(model, ticks)
