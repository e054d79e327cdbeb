"""The Python client beside the HTTP server: several at once, text and ids, cancelling and leaving."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_core.wire.sampling import SamplingParams
from frontend.client import AsyncClient, Client
from frontend.errors import EngineDead, RequestRejected
from tests.e2e.scripts import LINES_TEXT, STOPS_TEXT, alphabet
from tests.e2e.server import ROOT, Server

GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
LONG = SamplingParams(temperature=0.0, max_tokens=900)


def test_text_and_ids(chain_server: Server) -> None:
    with Client(chain_server.socket) as client:
        client.wait_ready(30)
        for prompt in ("say 0", list(b"say 0")):
            assert "".join(delta.text for delta in client.generate(prompt, GREEDY)) == LINES_TEXT
        with client.submit(list(b"1"), GREEDY) as answer:
            outputs = list(answer)
        tokens = [token for output in outputs for token in output.token_ids]
        assert len(tokens) == 7
        assert (outputs[-1].finish, outputs[-1].stop_token_id) == ("stop", tokens[-1])


def test_stop_strings(chain_server: Server) -> None:
    with Client(chain_server.socket) as client:
        deltas = list(client.generate("1", GREEDY, stop=["EFG", "HIJ"]))
    assert "".join(delta.text for delta in deltas) == STOPS_TEXT[: STOPS_TEXT.index("EFG")]
    assert (deltas[-1].finish, deltas[-1].stop_reason) == ("stop", "EFG")


def test_several_clients_at_once_get_their_own_answers(chain_server: Server) -> None:
    def run(letter: str) -> str:
        with Client(chain_server.socket, name=f"client {letter}") as client:
            # The same request id in every client: ids of two clients never meet.
            answer = client.generate(letter * 3, GREEDY, request_id="the one")
            return "".join(delta.text for delta in answer)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, "abcdefgh")) == [alphabet(letter, 100) for letter in "abcdefgh"]


def test_many_requests_of_one_client_at_once(chain_server: Server) -> None:
    async def text(client: AsyncClient, letter: str) -> str:
        answer = await client.generate(letter, GREEDY)
        return "".join([delta.text async for delta in answer])

    async def run() -> list[str]:
        async with await AsyncClient.connect(chain_server.socket) as client:
            await client.wait_ready(30)
            return await asyncio.gather(*(text(client, letter) for letter in letters))

    letters = "abcdefghijklmnopqrstuvwxyz" * 3
    assert asyncio.run(run()) == [alphabet(letter, 100) for letter in letters]


def test_cancelled_and_left_requests_free_everything(chain_server: Server) -> None:
    async def run() -> None:
        async with await AsyncClient.connect(chain_server.socket) as watcher:
            await watcher.wait_ready(30)
            async with await AsyncClient.connect(chain_server.socket) as leaver:
                answers = [leaver.submit([97, 98, 99], LONG) for _ in range(20)]
                await anext(answers[0])
                answers[0].abort()
                answers[1].abort()
                answers[1].abort()
                last = [output async for output in answers[0]][-1]
                assert last.finish == "abort"
            async with asyncio.timeout(10):
                while True:
                    ledger = await watcher.inspect(5)
                    if ledger.owned == 0:
                        break
                    await asyncio.sleep(0.02)
            assert ledger.violations == []
            assert ledger.free + ledger.cached == ledger.total

    asyncio.run(run())


def test_what_the_core_refuses_names_the_numbers(chain_server: Server) -> None:
    with Client(chain_server.socket) as client:
        client.wait_ready(30)
        for prompt, code, field in (([512], "invalid", "prompt"), ([97] * 1024, "context_length", "prompt")):
            with pytest.raises(RequestRejected) as caught:
                list(client.submit(prompt, GREEDY))
            assert caught.value.reject_code == code
            assert field in str(caught.value.field)
        assert "".join(delta.text for delta in client.generate("a", GREEDY)) == alphabet("a", 100)


def test_a_program_of_its_own(chain_server: Server) -> None:
    program = (
        "import sys\n"
        "from engine_core.wire.sampling import SamplingParams\n"
        "from frontend.client import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    for delta in client.generate('x', SamplingParams(temperature=0, max_tokens=5)):\n"
        "        print(delta.text, end='')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(chain_server.socket)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, alphabet("x", 5), "")


def test_clients_hear_of_the_end(chain_server: Server) -> None:
    with Client(chain_server.socket) as client:
        client.wait_ready(30)
        answer = client.submit([97], LONG)
        next(answer)
        chain_server.process.kill()
        with pytest.raises(EngineDead):
            list(answer)
