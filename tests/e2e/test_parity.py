"""The served model against transformers in float32, on the same folder: tokens and log-probabilities.

The engine's log-probabilities are log-softmax of its logits, so equal logits give equal log-probabilities; those of
the twenty likeliest tokens are compared. The whole vocabulary is compared in the executor's own tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_core.wire.client import TokenLogprobs
from engine_core.wire.sampling import SamplingParams
from frontend.client import AsyncClient
from tests.e2e.server import Server
from tests.fixtures.llama import RAND_SHAPE
from tests.fixtures.reference import Continuation, Reference, prompts

TOKENS = 64
PROMPTS = 32
SHORT = 20
MARGIN = 1e-3
TOLERANCE = 1e-3
TOP = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=TOP)
TEXT = (
    "The library opens at nine. Two readers wait at the door, and a third one comes up the street with 12 books\n"
    "under his arm: def read(book): return book.pages[-1]  # the last page first. \u4f60\u597d, \U0001f600!"
)

Answer = tuple[list[int], list[TokenLogprobs]]


async def answer(client: AsyncClient, prompt: Sequence[int], params: SamplingParams) -> Answer:
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    async for output in client.submit(prompt, params):
        tokens += output.token_ids
        logprobs += output.logprobs or []
    return tokens, logprobs


async def answers(socket: Path, asked: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
    """All answers, asked for at once."""
    async with await AsyncClient.connect(socket, name="test") as client:
        await client.wait_ready(60)
        return list(await asyncio.gather(*(answer(client, prompt, params) for prompt in asked)))


def ask(server: Server, asked: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[Answer]:
    return asyncio.run(answers(server.socket, asked, params))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def error_of(entry: TokenLogprobs, logits: NDArray[np.float32]) -> float:
    """Largest difference over the likeliest tokens."""
    expected = log_softmax(logits)[entry.top_ids]
    return float(np.abs(np.array(entry.top_logprobs) - expected).max())


def compare(expected: Continuation, got: Answer, *, near: list[str]) -> None:
    """Tokens equal up to the first near tie, log-probabilities up to there within the tolerance."""
    tokens, logprobs = got
    assert len(tokens) == len(expected.token_ids)
    for place, token in enumerate(expected.token_ids):
        assert error_of(logprobs[place], expected.logits[place]) <= TOLERANCE
        if tokens[place] != token:
            gap = expected.gaps[place]
            assert gap < MARGIN, f"token {place}: {tokens[place]} instead of {token}, lead {gap}"
            near.append(f"prompt of {len(expected.prompt)} tokens, token {place}: lead {gap:.1e}")
            return


@pytest.fixture(scope="module")
def rand_reference(rand_folder: Path) -> Reference:
    return Reference(rand_folder)


def test_greedy_tokens_equal_transformers(
    rand_server: Server, rand_reference: Reference, record_property: Callable[[str, object], None]
) -> None:
    asked = prompts(PROMPTS, vocab=RAND_SHAPE.vocab, seed=11)
    near: list[str] = []
    for prompt, got in zip(asked, ask(rand_server, asked), strict=True):
        compare(rand_reference.greedy(prompt, TOKENS), got, near=near)
    record_property("near_ties", near)
    assert len(near) <= PROMPTS // 10


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 300])
def test_prompts_at_the_borders_of_blocks_and_chunks(
    rand_server: Server, rand_reference: Reference, length: int
) -> None:
    (prompt,) = prompts(1, vocab=RAND_SHAPE.vocab, seed=length, shortest=length, longest=length)
    params = SamplingParams(temperature=0.0, max_tokens=SHORT, ignore_eos=True, logprobs=TOP)
    (got,) = ask(rand_server, [prompt], params)
    compare(rand_reference.greedy(prompt, SHORT), got, near=[])
    # The prefix cache holds the prompt now: the answer stays.
    (again,) = ask(rand_server, [prompt], params)
    assert again[0] == got[0]


def test_an_answer_does_not_depend_on_its_neighbours(rand_server: Server) -> None:
    asked = prompts(12, vocab=RAND_SHAPE.vocab, seed=3, shortest=5, longest=90)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)
    alone = [ask(rand_server, [prompt], params)[0][0] for prompt in asked]
    together = [tokens for tokens, _ in ask(rand_server, asked, params)]
    assert together == alone
    backwards = [tokens for tokens, _ in ask(rand_server, asked[::-1], params)]
    assert backwards[::-1] == alone


def teacher_forced(server: Server, reference: Reference, token_ids: Sequence[int]) -> float:
    """Largest error over all prefixes of a text, each asked for its next token alone."""
    prefixes = [token_ids[: end + 1] for end in range(len(token_ids))]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=TOP)
    logits = reference.logits(token_ids)
    return max(
        error_of(logprobs[0], logits[place]) for place, (_, logprobs) in enumerate(ask(server, prefixes, params))
    )


def test_teacher_forced_logprobs_on_rand(rand_server: Server, rand_reference: Reference) -> None:
    (text,) = prompts(1, vocab=RAND_SHAPE.vocab, seed=21, shortest=100, longest=100)
    assert teacher_forced(rand_server, rand_reference, text) <= TOLERANCE


@pytest.mark.real_model
def test_default_model_against_transformers(default_model: Path) -> None:
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(default_model / "tokenizer.json")).encode(TEXT).ids
    reference = Reference(default_model)
    flags = ("--num-kv-blocks", "256", "--max-num-batched-tokens", "64", "--max-model-len", "1024")
    with Server(default_model, *flags) as server:
        server.wait_ready()
        assert teacher_forced(server, reference, text) <= TOLERANCE
        near: list[str] = []
        asked = [text[:length] for length in (3, 16, 70)]
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=TOP)
        for prompt, got in zip(asked, ask(server, asked, params), strict=True):
            compare(reference.greedy(prompt, 32), got, near=near)
        assert len(near) <= 1
