"""A handful of deaths with the real executor: CHAIN's exact text, and RAND's exact ids, seeded and unseeded."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.waiting import until
from tests.fault.rig import REAL, Rig
from tests.fault.traffic import Request, Traffic
from tests.fixtures.chain import Chain

FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--cpu-threads", "1")


def kill(rig: Rig, place: int) -> None:
    """Kill a process and wait for the next one."""
    pid = rig.pid(place)
    os.kill(pid, signal.SIGKILL)
    until("it is replaced", lambda: rig.pids()[place] not in (0, pid), 30.0)


@pytest.mark.slow
def test_chain_says_the_same_text(chain_folder: Path) -> None:
    with Rig(chain_folder, flags=FLAGS, command=REAL) as rig:
        client = rig.wait_ready().client()
        client.wait_ready(60.0)
        chain = Chain()
        for place in (1, 2):
            traffic = Traffic(rig, client, lambda prompt, count: chain.follow(prompt[-1], count))
            for number, (kind, n) in enumerate(
                (("stream", 1), ("stream", 2), ("whole", 1), ("python", 1), ("whole", 2))
            ):
                traffic.start(Request(kind, [*b"abcdefgh"[: number + 1]], 800, n, 1 if number == 2 else None))
            before = client.status.generation_tokens if client.status is not None else 0
            until("tokens are made", lambda: (client.status or _none()).generation_tokens > before + 50)  # noqa: B023
            assert traffic.under_way() == 5
            kill(rig, place)
            assert traffic.wait(120.0) == []
            texts = [got.text for request in traffic.requests[:2] for got in request.answers.values()]
            assert all("uvwxyzabc" in text for text in texts)
            until("it is ready", lambda: rig.health() == (200, "ready"), 30.0)
            ledger = rig.invariants()
            assert (ledger["owned"], ledger["violations"]) == (0, [])


def _none() -> Any:
    raise AssertionError("the client has no status")


TOKENS = 250
# Seeds whose tokens lie far from ties: how rows share a step changes the last bits of a logit.
BODIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 11, "n": 2},
    {"temperature": 0.8, "seed": 14, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.0, "seed": 13, "min_tokens": 100, "top_k": 40},
]


def answers(rig: Rig) -> list[list[list[int]]]:
    """The ids of each answer of each body, asked for all at once."""

    def ask(number: int) -> list[list[int]]:
        body = {
            "prompt": [3 + number, 5, 7, 11] * 9,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{rig.url}/v1/completions", json=body | BODIES[number], timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert all(len(choice["token_ids"]) == TOKENS for choice in choices)
        return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]

    with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(ask, range(len(BODIES))))


def test_rand_samples_the_same_ids(rand_folder: Path) -> None:
    with Rig(rand_folder, flags=FLAGS, command=REAL) as rig, concurrent.futures.ThreadPoolExecutor(1) as pool:
        rig.wait_ready()
        undisturbed = answers(rig)
        for place in (1, 2):
            until("the last report is of now", lambda: rig.metric("tercet_num_requests_running") == 0)
            before = rig.metric("tercet_engine_generation_tokens_total")
            disturbed = pool.submit(answers, rig)
            until("tokens are made", lambda: rig.metric("tercet_engine_generation_tokens_total") > before + 100, 60.0)  # noqa: B023
            assert not disturbed.done()
            kill(rig, place)
            assert disturbed.result(120.0) == undisturbed
        assert rig.metric("tercet_engine_restarts_total") == rig.metric("tercet_executor_restarts_total") == 1
        assert rig.metric("tercet_requests_recovered_total") >= 2
