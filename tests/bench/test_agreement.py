"""The figures of `tercet bench serve` against those of another client, the openai package, on the same server."""

from __future__ import annotations

import json
import statistics
import time
from itertools import pairwise

import openai
import pytest

from bench.__main__ import main
from tests.fakes.live import LiveServer

STEP_S = 0.02
OUTPUT = 20
REQUESTS = 5


def measured(live: LiveServer) -> dict[str, float]:
    """What the other client sees, one request after the other; seconds."""
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    firsts: list[float] = []
    gaps: list[float] = []
    began = time.perf_counter()
    for number in range(REQUESTS):
        sent = time.perf_counter()
        times = [
            time.perf_counter()
            for chunk in client.completions.create(
                model="chain", prompt=[97 + number], max_tokens=OUTPUT, stream=True, extra_body={"ignore_eos": True}
            )
            if chunk.choices[0].text
        ]
        firsts.append(times[0] - sent)
        gaps += [later - earlier for earlier, later in pairwise(times)]
    seconds = time.perf_counter() - began
    client.close()
    rate = REQUESTS * OUTPUT / seconds
    return {"rate": rate, "ttft": statistics.median(firsts), "itl": statistics.median(gaps)}


@pytest.mark.slow  # Times of two runs are alike only where nothing else runs.
def test_both_clients_agree(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    live.core.step_s = STEP_S
    words = ["--max-concurrency", "1", "--num-prompts", str(REQUESTS), "--random-input-len", "1", "--vocab", "126"]
    assert main(["serve", "--base-url", live.url, *words, "--random-output-len", str(OUTPUT), "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    theirs = measured(live)
    assert ours["median_itl_ms"] == pytest.approx(1000 * theirs["itl"], rel=0.15)
    assert ours["output_throughput"] == pytest.approx(theirs["rate"], rel=0.2)
    # The other client takes some milliseconds of its own to send a request.
    assert ours["median_ttft_ms"] <= 1000 * theirs["ttft"] * 1.5 + 5
