"""Load with random kills every few seconds: each answer is exactly that of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.waiting import until
from tests.fault.rig import Rig
from tests.fault.traffic import Request, Traffic

DEFAULT_S = 600.0
SECONDS_VARIABLE = "TERCET_SOAK_S"
FLAGS = (
    *("--max-num-seqs", "8", "--num-kv-blocks", "160", "--block-size", "4", "--max-num-batched-tokens", "64"),
    *("--max-restarts", "1000", "--step-timeout", "2"),
)
IN_FLIGHT = 16


def requests(chance: random.Random) -> Iterator[Request]:
    """Requests of every kind and size that the pool can hold."""
    while True:
        kind = chance.choice(["stream", "stream", "whole", "python"])
        prompt = [chance.randrange(512) for _ in range(chance.randint(1, 80))]
        n = 1 if kind == "python" else chance.choice([1, 1, 2])
        yield Request(kind, prompt, chance.randint(1, 150), n, chance.choice([None, None, 2]))


def strike(rig: Rig, chance: random.Random) -> str:
    """Something happens to the core or the executor; what, or nothing if it is not there."""
    place = chance.choice([1, 2, 2])
    number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
    pid = rig.pids()[place]
    if not pid:
        return ""
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it ended just now
        return ""
    return f"{number.name} to {('frontend', 'core', 'executor')[place]}"


@pytest.mark.slow
def test_ten_minutes_of_kills(chain_folder: Path) -> None:
    seconds = float(os.environ.get(SECONDS_VARIABLE, DEFAULT_S))
    chance = random.Random(5)
    with Rig(chain_folder, ("delay_s=0.005,load_s=0.2",), FLAGS) as rig:
        client = rig.wait_ready().client()
        client.wait_ready(20.0)
        end, next_strike, strikes = time.monotonic() + seconds, time.monotonic() + 2.0, Counter[str]()
        source, traffic, faults, sent = requests(chance), Traffic(rig, client), list[str](), 0
        while time.monotonic() < end:
            while traffic.under_way() < IN_FLIGHT:
                traffic.start(next(source))
                sent += 1
            faults += traffic.take_ended()
            if time.monotonic() > next_strike:
                strikes[strike(rig, chance)] += 1
                next_strike = time.monotonic() + chance.uniform(2.0, 6.0)
            time.sleep(0.02)
        faults += traffic.wait(120.0)
        until("it is ready", lambda: rig.health() == (200, "ready"), 30.0)
        del strikes[""]
        sys.stdout.write(
            f"requests sent {sent}, lost or wrong {len(faults)}, longest pause {traffic.longest_pause:.1f} s, "
            f"strikes {strikes.total()}: {dict(sorted(strikes.items()))}\n"
        )
        assert faults == []
        assert strikes.total() > seconds / 10
        ledger = rig.invariants()
        assert (ledger["owned"], ledger["violations"]) == (0, [])
        rig.process.send_signal(signal.SIGTERM)
        assert rig.wait_end() == 0
        assert rig.leftovers() == []
