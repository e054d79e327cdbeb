"""What users notice of the scheduler, through HTTP: progress under memory pressure, priority, salts, long prompts."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_core.wire.sampling import SamplingParams
from model_executor.startup import Executor
from tests.e2e.server import Server, wait_for
from tests.fixtures.llama import RAND_SHAPE, Shape, write_rand
from tests.fixtures.reference import prompts
from tests.model.real import alone, bring_up_on_cpu

BLOCK_SIZE = 16
# Fewer than four requests of the pressure test need.
TIGHT_BLOCKS = 24
LONG_PROMPT = 8000
BUDGET = 256
DEADLINE_S = 60.0
# Threads of one step wait for each other, which takes long where other processes have the cores.
ONE_THREAD = ("--cpu-threads", "1")


@dataclass
class Answer:
    """One streamed completion; times are seconds of a monotonic clock."""

    asked: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    cached: int = 0
    began: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def http_of(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, limits=limits) as http:
        yield http


async def complete(
    http: httpx.AsyncClient, prompt: Sequence[int] | str, count: int, into: Answer | None = None, **fields: Any
) -> Answer:
    """Stream `count` tokens."""
    body = {"model": "rand", "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True, **fields}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    answer = into or Answer()
    answer.asked = time.monotonic()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                take(answer, json.loads(line.removeprefix("data: ")))
    assert len(answer.token_ids) == count
    return answer


def take(answer: Answer, event: dict[str, Any]) -> None:
    """An event of the stream."""
    assert "error" not in event, event
    for choice in event["choices"]:
        new = choice.get("token_ids") or []
        answer.token_ids += new
        answer.arrivals += [time.monotonic()] * len(new)
        answer.began.set()
    if event.get("usage"):
        answer.cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def begin(
    http: httpx.AsyncClient, asked: Sequence[Sequence[int]], count: int, **fields: Any
) -> asyncio.Future[list[Answer]]:
    """Completions all of which have begun to stream."""
    answers = [Answer() for _ in asked]
    pairs = zip(asked, answers, strict=True)
    tasks = asyncio.gather(*(complete(http, prompt, count, answer, **fields) for prompt, answer in pairs))
    for answer in answers:
        await asyncio.wait_for(answer.began.wait(), DEADLINE_S)
    return tasks


@dataclass(frozen=True)
class Asked:
    """A greedy request that hangs on no near tie, and its answer."""

    prompt: list[int]
    expected: list[int]


@pytest.fixture(scope="module")
def executor(rand_folder: Path) -> Executor:
    """RAND in this process."""
    return bring_up_on_cpu(rand_folder)


def clear_requests(
    executor: Executor, count: int, tokens: int, *, seed: int, shortest: int, longest: int
) -> list[Asked]:
    """The first `count` of a series of random prompts whose answers no rounding can change."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    found: list[Asked] = []
    for prompt in prompts(4 * count, vocab=RAND_SHAPE.vocab, seed=seed, shortest=shortest, longest=longest):
        expected, clear = alone(executor, prompt, params, seed=0)
        if all(clear):
            found.append(Asked(prompt, expected))
        if len(found) == count:
            return found
    raise AssertionError(f"only {len(found)} of {count} prompts are clear")


def counter(server: Server, name: str) -> float:
    """The value of a counter in /metrics."""
    found = re.search(rf"^{name}_total\{{[^}}]*\}} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.fixture(scope="module")
def tight(rand_folder: Path) -> Iterator[Server]:
    """Four rows, few blocks, priorities."""
    flags = ("--max-num-seqs", "4", "--num-kv-blocks", str(TIGHT_BLOCKS), "--block-size", str(BLOCK_SIZE))
    more = ("--max-model-len", "128", "--max-num-batched-tokens", "64", "--scheduling-policy", "priority")
    with Server(rand_folder, "--served-model-name", "rand", *flags, *more, "--debug-endpoints", *ONE_THREAD) as server:
        yield server.wait_ready()


def check_idle(server: Server) -> None:
    """Nothing is held, and every invariant holds."""
    ledger = httpx.get(f"{server.url}/debug/invariants", timeout=10)
    assert ledger.status_code == 200, ledger.text
    found = ledger.json()
    assert found["violations"] == []
    assert found["owned"] == 0
    assert found["free"] + found["cached"] == found["total"] == TIGHT_BLOCKS


def test_progress_under_memory_pressure(tight: Server, executor: Executor) -> None:
    """Thirty requests, each of which fits, together more than five times the pool: all end, and as they do alone.

    On a busy machine they may come so slowly that nobody is preempted; then they come again.
    """
    count = 40
    asked = clear_requests(executor, 30, count, seed=84, shortest=50, longest=80)
    assert sum(len(each.prompt) + count for each in asked) > 5 * TIGHT_BLOCKS * BLOCK_SIZE

    async def run() -> None:
        # With a salt of its own each burst is computed in full.
        async with http_of(tight) as http:
            began = time.monotonic()
            alone = [await complete(http, each.prompt, count, cache_salt="alone") for each in asked[:5]]
            solo = (time.monotonic() - began) / len(alone) * len(asked)
            assert [answer.token_ids for answer in alone] == [each.expected for each in asked[:5]]
            for burst in range(10):
                began = time.monotonic()
                salt = f"burst {burst}"
                answers = await asyncio.gather(*(complete(http, each.prompt, count, cache_salt=salt) for each in asked))
                assert time.monotonic() - began < 3 * solo
                assert [answer.token_ids for answer in answers] == [each.expected for each in asked]
                if preempted():
                    assert counter(tight, "tercet_num_preemptions") < 10 * len(asked) * (burst + 1)
                    return
        raise AssertionError("nobody was preempted")

    def preempted() -> bool:
        """Whether the counter, which is told once a second, moves within two."""
        try:
            wait_for("preemptions in /metrics", lambda: counter(tight, "tercet_num_preemptions") > 0, 2)
        except AssertionError:
            return False
        return True

    asyncio.run(run())
    check_idle(tight)


def test_an_urgent_request_does_not_wait_for_a_row(tmp_path: Path) -> None:
    """All rows hold long requests of priority 10; one of priority 0 takes the row of one of them, and all end right."""
    count = 1500
    folder = write_rand(tmp_path / "rand", shape=Shape(max_position=2 * count))
    *slow, fast = prompts(5, vocab=RAND_SHAPE.vocab, seed=87, shortest=10, longest=10)
    flags = ("--max-num-seqs", "4", "--num-kv-blocks", "500", "--scheduling-policy", "priority", *ONE_THREAD)

    async def run(server: Server) -> None:
        async with http_of(server) as http:
            undisturbed = [answer.token_ids for answer in await (await begin(http, slow, count, priority=10))]
            alone = await complete(http, fast, 5, priority=0)
            assert counter(server, "tercet_num_preemptions") == 0
            rows = await begin(http, slow, count, priority=10)
            urgent = await complete(http, fast, 5, priority=0)
            low = await rows
        assert counter(server, "tercet_num_preemptions") > 0
        assert [answer.token_ids for answer in low] == undisturbed
        assert urgent.token_ids == alone.token_ids
        # First come, first served, it would wait for the first row to get free.
        assert urgent.arrivals[0] < min(answer.arrivals[-1] for answer in low)

    with Server(folder, "--served-model-name", "rand", *flags) as server:
        asyncio.run(run(server.wait_ready()))


@pytest.mark.parametrize("priority", ["high", 1.5, 2**70])
def test_a_priority_that_is_none(tight: Server, priority: Any) -> None:
    body = {"model": "rand", "prompt": [1, 2], "max_tokens": 2, "priority": priority}
    refused = tight.post("/v1/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"


def test_salts_keep_prefixes_apart(tight: Server, executor: Executor) -> None:
    (asked,) = clear_requests(executor, 1, 4, seed=82, shortest=64, longest=64)

    async def run() -> None:
        async with http_of(tight) as http:
            salts = (None, "a", "b", "a", None)
            answers = [await complete(http, asked.prompt, 4, cache_salt=salt) for salt in salts]
            # Where a salt ends and a prompt begins is never mistaken.
            text = "c" * 64
            await complete(http, text, 1, cache_salt="ab")
            shifted = await complete(http, "b" + text, 1, cache_salt="a")
        # The last token of a prompt is always computed, and with it its block.
        assert [answer.cached for answer in answers] == [0, 0, 0, 48, 48]
        assert shifted.cached == 0
        assert all(answer.token_ids == asked.expected for answer in answers)

    asyncio.run(run())


@pytest.mark.parametrize("salt", ["", 5])
def test_a_salt_that_is_none(tight: Server, salt: Any) -> None:
    body = {"model": "rand", "prompt": [1, 2], "max_tokens": 2, "cache_salt": salt}
    refused = tight.post("/v1/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"


def test_a_long_prompt_stops_nobody(tmp_path: Path) -> None:
    """Streams go on at least once a chunk, and short prompts are answered, while 8,000 tokens are computed."""
    folder = write_rand(tmp_path / "rand", shape=Shape(max_position=LONG_PROMPT + 64))
    (long_prompt,) = prompts(1, vocab=RAND_SHAPE.vocab, seed=1, shortest=LONG_PROMPT, longest=LONG_PROMPT)
    short = prompts(6, vocab=RAND_SHAPE.vocab, seed=2, shortest=8, longest=20)
    flags = (
        "--num-kv-blocks",
        "600",
        "--max-num-batched-tokens",
        str(BUDGET),
        "--no-enable-prefix-caching",
        *ONE_THREAD,
    )

    async def run(server: Server) -> None:
        async with http_of(server) as http:
            streams = await begin(http, short[:2], 400)
            prefill = asyncio.create_task(complete(http, long_prompt, 1))
            await asyncio.sleep(0)  # it is sent first
            late = [await complete(http, prompt, 5) for prompt in short[2:]]
            long = await prefill
            running = await streams
        end = long.arrivals[0]
        for answer in late:
            assert long.asked < answer.asked
            assert answer.arrivals[0] < end
        for answer in running:
            meanwhile = [at for at in answer.arrivals if long.asked < at < end]
            # The last ones may still be on their way when the long prompt's token is there.
            assert len(meanwhile) >= LONG_PROMPT // BUDGET - 3

    with Server(folder, "--served-model-name", "rand", *flags) as server:
        asyncio.run(run(server.wait_ready()))
        # And the cache can be switched off as a whole.
        asyncio.run(no_hits(server, short[0] * 4))


async def no_hits(server: Server, prompt: list[int]) -> None:
    """The same prompt twice finds nothing."""
    async with http_of(server) as http:
        assert [(await complete(http, prompt, 2)).cached for _ in range(2)] == [0, 0]


def test_the_trace_shows_every_step(rand_folder: Path, tmp_path: Path) -> None:
    """Which steps ran, what they were padded to, and what the core did meanwhile."""
    trace = tmp_path / "trace.json"
    flags = ("--trace-file", str(trace), "--cuda-graph-sizes", "2", "4", "--debug-endpoints", *ONE_THREAD)
    asked = prompts(3, vocab=RAND_SHAPE.vocab, seed=9)

    async def run(server: Server) -> list[list[int]]:
        async with http_of(server) as http:
            return [
                answer.token_ids for answer in await asyncio.gather(*(complete(http, prompt, 12) for prompt in asked))
            ]

    with Server(rand_folder, "--served-model-name", "rand", *flags) as server:
        server.wait_ready()
        asyncio.run(run(server))
        (choice,) = [
            each
            for each in httpx.get(f"{server.url}/reports/kernels", timeout=10).json()
            if each["operator"] == "decode_step"
        ]
        assert choice["chosen"] == "static_buffers"
        assert httpx.get(f"{server.url}/debug/invariants", timeout=10).json()["violations"] == []
        server.signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert "rows replayed" in server.log()
    events = [event for event in json.loads(trace.read_bytes())["traceEvents"] if event["ph"] == "X"]
    steps = [event["args"] for event in events if event["name"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step["tokens"] for step in steps) >= sum(map(len, asked)) + 3 * 11
    assert {step["bucket"] for step in steps} <= {0, 2, 4}
    assert any(step["bucket"] >= step["rows"] > 0 for step in steps)
    assert {event["name"] for event in events} >= {"step", "schedule", "update"}


def test_a_trace_file_that_cannot_be_written_is_refused_at_once(rand_folder: Path, tmp_path: Path) -> None:
    with Server(rand_folder, "--trace-file", str(tmp_path / "none" / "trace.json")) as server:
        assert server.wait_end() == 2
        assert "--trace-file" in server.log()
