"""Cache off and paging off, through the packaged server: slower, and with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from engine_core.wire.sampling import SamplingParams
from frontend.client import AsyncClient
from tests.e2e.server import Server
from tests.fixtures.llama import RAND_SHAPE
from tests.fixtures.reference import prompts
from tests.model.real import alone, bring_up_on_cpu

COUNT = 12
LENGTH = 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
# Room for two sequences of LENGTH tokens, and a remainder.
POOL = ("--block-size", "16", "--num-kv-blocks", "20", "--max-model-len", str(LENGTH), "--cpu-threads", "1")

Asked = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def asked(rand_folder: Path) -> Asked:
    """Prompts, and answers that hang on no near tie."""
    executor = bring_up_on_cpu(rand_folder)
    found = []
    for prompt in prompts(20, vocab=RAND_SHAPE.vocab, seed=9, shortest=20, longest=90):
        answer, clear = alone(executor, prompt, GREEDY, seed=0)
        if all(clear):
            found.append((prompt, answer))
    assert len(found) > 8
    return found


async def answers(server: Server, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """All answers, asked for at once."""

    async def answer(client: AsyncClient, prompt: Sequence[int]) -> list[int]:
        return [token async for output in client.submit(prompt, GREEDY) for token in output.token_ids]

    async with await AsyncClient.connect(server.socket, name="test") as client:
        await client.wait_ready(60)
        return list(await asyncio.gather(*(answer(client, prompt) for prompt in asked)))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags.split(), id=flags, marks=marks)
        for flags, marks in (
            ("--no-enable-kv-cache --max-num-batched-tokens 256", pytest.mark.slow),
            ("--no-enable-kv-cache --max-num-batched-tokens 32 --no-async-scheduling", ()),
            ("--kv-cache-reservation contiguous", ()),
            ("--kv-cache-reservation contiguous --batching static", pytest.mark.slow),
        )
    ],
)
def test_answers_are_the_same(rand_folder: Path, asked: Asked, flags: Sequence[str]) -> None:
    with Server(rand_folder, "--served-model-name", "rand", *POOL, *flags, "--debug-endpoints") as server:
        server.wait_ready()
        found = asyncio.run(answers(server, [prompt for prompt, _ in asked]))
        assert found == [answer for _, answer in asked]
        ledger = httpx.get(f"{server.url}/debug/invariants", timeout=10).json()
        assert (ledger["violations"], ledger["owned"], ledger["free"]) == ([], 0, 20)
